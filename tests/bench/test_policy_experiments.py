"""starve, fair and priority, in small, on a random model: the keys readers rely on, and true figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench
from bench import fair, priority, starve
from policies import POLICIES
from tests.model.test_transformer import save_random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_random_model(directory, "llama")
    return directory


def results(name: str, model: Path, out: Path, *options: str) -> dict[str, Any]:
    """Run an experiment; whether its bars about time are met is not a test's business."""
    assert bench.main([name, "--out", str(out), "--model", str(model), *options]) in (0, 1)
    assert (out / f"{name}.png").stat().st_size > 10_000
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return found


def bars(found: dict[str, Any]) -> dict[str, bool]:
    return {bar["what"]: bar["met"] for bar in found["bars"]}


def test_starve_completes_everything_and_changes_no_bit(model: Path, tmp_path: Path) -> None:
    found = results("starve", model, tmp_path, "--requests", "12")
    assert [(r["policy"], r["pool"]) for r in found["runs"]] == [
        (policy, pool) for policy in POLICIES for pool in starve.POOLS
    ]
    for run in found["runs"]:
        assert run["completed"] == run["total"] == 12
        assert run["different"] == 0
        assert run["kv_tokens"] >= run["pool"] * found["need_kv_tokens"] - 1
        assert run["queue"][-1][1] == 0
    assert all(bars(found).values())
    tight = [r for r in found["runs"] if r["policy"] == "fcfs"]
    assert tight[0]["preemptions_per_request"] == 0
    assert tight[-1]["recomputed_tokens"] > 0
    assert found["recompute"]["seconds_per_token"] > 0
    assert found["recompute"]["kv_bytes_per_token"] == 3 * 2 * 2 * 16 * 4


def test_fair_keeps_the_gap_within_its_bound(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair, "MOST_ROUNDS", 1)
    found = results("fair", model, tmp_path, "--flood", "48", "--rounds", "1")
    assert found["b_ttft_p95"].keys() == {"alone", "fcfs", "fair"}
    assert 0 < found["max_service_gap"] <= found["gap_bound"]
    assert all(seconds > 0 for seconds in found["b_ttft_p95"].values())
    assert found["throughput_ratio"] == pytest.approx(found["throughput_ratios"][0])
    assert found["whole_run_ratio"] > 0
    assert min(found["drain_steps"].values()) > 0
    assert bars(found)["A's requests waiting when B's burst arrives, fewest of all runs"]


def test_a_burst_after_the_flood_is_found_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair, "BURST_AT", 3.0)
    found = results("fair", model, tmp_path, "--flood", "8", "--rounds", "1")
    assert found["a_waiting_at_burst"] == 0
    assert not bars(found)["A's requests waiting when B's burst arrives, fewest of all runs"]


def test_priority_displaces(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority, "BACKGROUND", 12)
    found = results("priority", model, tmp_path, "--urgent", "6", "--every", "0.02")
    assert found["urgent_ttft_p95"] > 0
    assert found["step_median"] > 0
    assert found["own_prefill"] > 0
    ours, polite = found["policies"].values()
    assert ours["displaced"] > 0 == polite["displaced"]
    assert len(ours["urgent"]["ttft"]) == len(polite["urgent"]["ttft"]) == 6
    assert min(ours["waiting_at_last_urgent"], polite["waiting_at_last_urgent"]) > 0
    assert bars(found)["background requests waiting when the last urgent one arrives, fewest of all runs"]
