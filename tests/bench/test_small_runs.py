"""prefill, gap, throughput and exactness, in small, on a random model: they run, and their figures add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import gap
from bench.__main__ import main
from tests.model.test_transformer import save_random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for the longest request of every preset."""
    directory = tmp_path_factory.mktemp("model")
    save_random_model(directory, "llama")
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2048}))
    return directory


def results(name: str, model: Path, out: Path, *options: str) -> dict[str, Any]:
    """Run an experiment; whether its bars about time are met is not a test's business."""
    assert main([name, "--out", str(out), "--model", str(model), *options]) in (0, 1)
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    assert found["tables"]
    return found


def test_prefill_computes_no_padding_in_a_ragged_batch(model: Path, tmp_path: Path) -> None:
    options = ("--preset", "smoke", "--slots", "4", "--max-len", "128", "--rounds", "1")
    *_, most = results("prefill", model, tmp_path, *options)["arrivals"]
    assert most["arrivals"] == 4
    assert most["batched, ragged"]["rows_computed"] < most["batched, padded"]["rows_computed"]
    assert most["batched, ragged"]["steps"] == 1
    assert most["separate"]["ttft_max"] >= most["separate"]["ttft_mean"] > 0
    assert (tmp_path / "prefill.png").stat().st_size > 10_000


def test_gap_accounts_for_the_whole_step(model: Path, tmp_path: Path) -> None:
    found = results("gap", model, tmp_path, "--no-serve", "--slots", "4", "--max-len", "256")
    assert found["items"].keys() == set(gap.ITEMS)
    assert sum(found["items"].values()) == pytest.approx(found["step_with_stopwatch"], rel=1e-4)
    assert all(found["items"][name] > 0 for name in ("linear layers", "output head", "attention", "sampling"))
    assert all(seconds > 0 for seconds in found["ideal"].values())
    assert (tmp_path / "gap.png").stat().st_size > 10_000


def test_throughput_times_the_layers_of_each_round(model: Path, tmp_path: Path) -> None:
    found = results("throughput", model, tmp_path, "--requests", "4", "--slots", "2", "--rounds", "2")
    assert len(found["rounds"]) == 2
    for played in found["rounds"]:
        assert played["engine_seconds"] > played["linear_seconds"] > 0
    assert found["ratio_to_linear"] > 1


def test_exactness_stops_requests_that_were_interrupted(model: Path, tmp_path: Path) -> None:
    found = results("exactness", model, tmp_path, "--requests", "32", "--slots", "4")
    assert found["different"] == 0
    assert found["preemptions"] > 0 < found["resumes"]
    assert min(found["late_stops_by_mode"].values()) >= 1
    assert all(bar["met"] for bar in found["bars"])


@pytest.mark.parametrize("name", ["exactness", "throughput"])
def test_a_model_that_is_not_there_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--out", str(tmp_path), "--model", str(tmp_path / "nothing.gguf")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
