"""Workloads: the same seed gives the same requests, and lengths are what a preset promises."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from bench import options, workload
from bench.lengths import HeavyTail, Spread
from bench.replay import from_trace
from bench.report import BenchError
from bench.workload import Shape


@pytest.mark.parametrize("name", workload.PRESETS)
def test_a_preset_is_its_seed(name: str) -> None:
    assert workload.preset(name, seed=3) == workload.preset(name, seed=3)
    assert workload.preset(name, seed=3).items != workload.preset(name, seed=4).items


@pytest.mark.parametrize("seed", range(5))
def test_default_preset_has_the_size_that_figures_are_compared_at(seed: int) -> None:
    load = workload.preset("default", seed=seed)
    outputs = [item.output_tokens for item in load.items]
    assert len(load) == 64
    assert load.prompt_tokens == pytest.approx(5509, rel=0.05)
    assert load.output_tokens == pytest.approx(3642, rel=0.03)
    assert (min(outputs), max(outputs)) == (4, 256)


def test_heavy_tail_is_log_normal_below_and_pareto_above_its_joint() -> None:
    lengths = HeavyTail(median=100, sigma=0.5, low=1, high=10**9, tail=0.1, alpha=1.5)
    q16, median, q84 = lengths.quantile(np.array([0.158655, 0.5, 0.841345]))
    assert median == pytest.approx(100)
    assert median / q16 == pytest.approx(np.exp(0.5), rel=1e-4)
    assert q84 / median == pytest.approx(np.exp(0.5), rel=1e-4)
    joint, tenfold, hundredfold = lengths.quantile(np.array([0.9, 0.99, 0.999]))
    assert tenfold / joint == pytest.approx(10 ** (1 / 1.5))
    assert hundredfold / tenfold == pytest.approx(10 ** (1 / 1.5))


def test_azure_like_has_the_published_quantiles_scaled_to_the_context() -> None:
    load = workload.preset("azure-like", requests=2000)
    prompts = np.percentile([len(item.prompt) for item in load.items], [50, 90, 99])
    outputs = np.percentile([item.output_tokens for item in load.items], [5, 25, 50, 75, 90, 95])
    scale = 2048 / (4142 + 601)
    assert prompts == pytest.approx(np.array([1020, 2735, 4142]) * scale, rel=0.02)
    assert outputs == pytest.approx(np.array([41, 85, 129, 395, 424, 451]) * scale, rel=0.04)
    assert max(len(item.prompt) + item.output_tokens for item in load.items) <= 2048


@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0])
def test_spread_keeps_the_mean_and_sets_the_variation(variation: float) -> None:
    shape = Shape(4000, Spread(50, 0, 100), Spread(200, variation, 100_000))
    lengths = [item.output_tokens for item in workload.build(shape).items]
    assert np.mean(lengths) == pytest.approx(200, rel=0.01)
    assert np.std(lengths) / np.mean(lengths) == pytest.approx(variation, rel=0.05, abs=1e-9)


@pytest.mark.parametrize("burstiness", [1.0, 3.0])
def test_arrivals_keep_the_rate_and_the_variation_of_their_gaps(burstiness: float) -> None:
    times = workload.arrivals(20_000, 4.0, burstiness=burstiness)
    gaps = np.diff(times)
    assert times[0] == 0
    assert (gaps >= 0).all()
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness, rel=0.06)


def test_arriving_changes_the_pace_and_nothing_else() -> None:
    load = workload.preset("smoke")
    paced = load.arriving(2.0)
    assert paced.items[-1].arrival > 0
    assert [(i.prompt, i.output_tokens) for i in paced.items] == [
        (i.prompt, i.output_tokens) for i in load.items
    ]
    assert paced.arriving(None) == load


def test_a_shared_prefix_is_an_option() -> None:
    parser = argparse.ArgumentParser()
    options.add_workload(parser)
    chosen = [
        options.workload(parser.parse_args(["--preset", "long-prompts", *extra]), max_len=2048)
        for extra in ([], ["--shared-prefix", "64"])
    ]
    plain, shared = ({item.prompt[:64] for item in load.items} for load in chosen)
    assert (len(plain), len(shared)) == (24, 1)
    assert [len(item.prompt) for item in chosen[0].items] == [len(item.prompt) for item in chosen[1].items]


def test_prefix_tenants_and_priorities_are_shared_as_asked() -> None:
    shape = Shape(
        400,
        Spread(40, 0, 40),
        Spread(4, 0, 4),
        shared_prefix=16,
        tenants={"a": 3, "b": 1},
        priorities={0: 1, -1: 1},
    )
    load = workload.build(shape)
    prefixes = {tenant: {i.prompt[:16] for i in load.items if i.tenant == tenant} for tenant in "ab"}
    assert [len(seen) for seen in prefixes.values()] == [1, 1]
    assert len({i.prompt for i in load.items}) == 400
    assert sum(i.tenant == "a" for i in load.items) == pytest.approx(300, abs=40)
    assert sum(i.priority == 0 for i in load.items) == pytest.approx(200, abs=40)


def test_a_request_and_a_body_force_the_same_length() -> None:
    item = workload.preset("smoke").items[0]
    request, body = item.request(start=5.0), item.body("m")
    assert request.params.ignore_eos
    assert body["ignore_eos"] is True
    assert request.params.max_tokens == body["max_tokens"] == item.output_tokens
    assert request.prompt == body["prompt"] == list(item.prompt)
    assert request.arrival == 5.0 + item.arrival


TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,100,10\n2.5,300,20\n"


def test_a_trace_is_replayed_from_its_first_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    load = from_trace(path, max_len=1000, time_scale=2.0)
    assert [(i.arrival, len(i.prompt), i.output_tokens) for i in load.items] == [(0, 100, 10), (4, 300, 20)]
    assert len(from_trace(path, max_len=1000, requests=1)) == 1


def test_a_trace_shrinks_to_the_context(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE + "3,3000,300\n")
    load = from_trace(path, max_len=100)
    assert max(len(i.prompt) + i.output_tokens for i in load.items) == 100
    assert all(i.output_tokens >= 1 for i in load.items)


def test_azure_dates_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.4799600,396,109\n"
    )
    load = from_trace(path, max_len=2048)
    assert load.items[1].arrival == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "line 1: expected the header"),
        ("a,b,c\n", "line 1: expected the header"),
        (TRACE.partition("\n")[0], "line 2: the trace has no requests"),
        (TRACE + "3.5,7\n", "line 4: expected time"),
        (TRACE + "3.5,seven,1\n", "line 4: expected time"),
        (TRACE + "3.5,7,0\n", "line 4: expected time"),
        (TRACE + "nan,7,1\n", "line 4: expected time"),
        (TRACE + "0.4,7,1\n", "line 4: arrives before the first request"),
    ],
)
def test_a_malformed_trace_names_the_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(BenchError, match=complaint):
        from_trace(path, max_len=2048)


def test_an_unreadable_trace_and_an_unknown_preset_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"cannot read the trace .*missing.csv"):
        from_trace(tmp_path / "missing.csv", max_len=2048)
    with pytest.raises(BenchError, match="unknown preset 'heavy'; choose from smoke"):
        workload.preset("heavy")
