"""The head-to-head and the sweep in small: the loops really run, and their figures add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.tokenizer import Tokenizer
from bench import compare, variance, workload
from bench.__main__ import main
from bench.samples import mean_of
from model.files import find_model
from tests.bench.toy_server import toy_served
from tests.model.test_transformer import save_random_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(find_model(), tmp_path_factory.getbasetemp().parent / "slotserve-tokenizers")


def run(name: str, out: Path, *options: str) -> dict[str, Any]:
    """Run it; whether its bars about time are met is not a test's business."""
    assert main(["compare", "--out", str(out), *options]) in (0, 1)
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return found


def test_a_side_that_runs_twice_counts_as_the_mean_of_its_turns() -> None:
    turns: list[dict[str, Any]] = [
        {"tokens_per_s": 100.0, "utilization": 0.9},
        {"tokens_per_s": 150.0, "utilization": None},
    ]
    assert mean_of(turns) == {"tokens_per_s": 125.0, "utilization": None}
    assert mean_of(turns[:1]) == turns[0]


def test_static_batches_need_as_many_steps_as_their_longest_answers() -> None:
    items = [workload.Item(str(n), 0.0, (1,), length) for n, length in enumerate([9, 1, 2, 3, 5, 1])]
    # Pairs: 9 + 3 + 5. Refilled: one slot has the 9, then the last one; the other 1 + 2 + 3 + 5.
    assert compare.fewest_steps(workload.Workload("w", tuple(items)), slots=2) == (17, 11)


def test_both_sides_start_with_all_requests_waiting(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "served", toy_served(tokenizer))
    options = ["--preset", "smoke", "--requests", "14", "--open-requests", "4", "--slots", "4"]
    found = run("compare", tmp_path, *options, "--max-len", "128")
    # So a static batch is four requests in a row, from the first batch to the last.
    assert found["closed"]["static"]["steps"] == found["fewest_steps"]["static"]
    assert found["closed"]["continuous"]["steps"] >= found["fewest_steps"]["continuous"]
    assert found["closed"]["continuous"]["steps"] < found["closed"]["static"]["steps"]
    for side in ("static", "continuous"):
        assert found["closed"][side]["completed"] == 14
        assert found["closed"][side]["ttft_p50"] > 0
    shares = [rate["share"] for rate in found["rates"]]
    assert shares == [0.35, 0.7]
    for rate in found["rates"]:
        assert rate["static"]["completed"] == 4
        static = found["closed"]["static"]["requests_per_s"]
        assert rate["of_static"] == pytest.approx(rate["requests_per_s"] / static, rel=1e-4)
        assert rate["ttft_gain"] > 0
        draws = 3 if rate["share"] == compare.LOAD else 1
        assert {side: len(p95) for side, p95 in rate["ttft_p95_by_draw"].items()} == {
            "continuous": draws,
            "static": draws,
        }
    assert found["open"] == found["rates"][1]
    for picture in ("compare.png", "compare-slots.png"):
        assert (tmp_path / picture).stat().st_size > 10_000
    said = " ".join(capsys.readouterr().out.split())
    assert f"({found['open']['of_static']:.2g} times the rate that static batching can)" in said


def test_the_sweep_compares_both_sides_at_every_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random_model(tmp_path / "model", "llama")
    monkeypatch.setattr(variance, "VARIATIONS", (0.0, 2.0))
    monkeypatch.setattr(variance, "ROUNDS", 1)
    options = ["--sweep", "variance", "--model", str(tmp_path / "model"), "--slots", "4", "--requests", "12"]
    equal, spread = run("compare-variance", tmp_path / "out", *options, "--max-len", "512")["sweep"]
    assert equal["variation"] == 0
    assert equal["fewer_steps"] == pytest.approx(1, abs=0.1)
    assert spread["fewer_steps"] > 1
    assert spread["gain"] > 0
    assert (tmp_path / "out" / "compare-variance.png").stat().st_size > 10_000
