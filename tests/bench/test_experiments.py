"""What the experiments conclude from their measurements, and how they fail."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench import compare, peers, results, spike, workload
from bench.__main__ import main
from bench.peers import PEERS, Peer, Worker
from bench.report import BenchError, Report
from bench.spike import Trial
from engine_actor.engine import Engine
from engine_actor.scheduler import Mode
from policies.fcfs import Fcfs
from tests.fakes import FakeModel, fake_kv


def trial(worst: float, ttft: float) -> Trial:
    return Trial([(0.0, worst), (1.0, 0.1)], ttft, 1.0, [], 0)


def test_the_knee_lies_where_stall_and_wait_are_both_low() -> None:
    sweep = {32: trial(0.1, 9.0), 64: trial(0.2, 3.0), 128: trial(1.0, 2.5), 256: trial(2.0, 2.0)}
    assert spike._knee(sweep) == 64


def test_a_stall_of_one_trial_alone_does_not_count_and_one_of_all_does() -> None:
    trials = [trial(0.1, 1.0), trial(0.9, 1.2), trial(0.12, 1.1)]
    typical = spike._typical(trials)
    assert (typical.worst, typical.ttft) == (0.12, 1.1)
    assert spike._typical([trial(0.9, 1.0)] * 3).worst == 0.9


@pytest.mark.parametrize("mode", ["separate", "batched", "chunked"])
def test_a_trial_blames_the_step_that_carried_the_prompt(mode: Mode) -> None:
    engine = Engine(FakeModel(), fake_kv(max_len=512), Fcfs(), mode=mode, max_step_tokens=40)
    result = spike._trial(engine, decoders=3, prompt=100)
    guilty = next(r for r in result.records if r.number == result.guilty)
    rows = {span.request_id: span.tokens for span in guilty.spans if span.kind == "prefill"}
    assert rows["long"] == (100 if mode != "chunked" else rows["long"])
    assert mode != "chunked" or rows["long"] <= 37
    carried = sum(s.tokens for r in result.records for s in r.spans if s.request_id == "long")
    assert carried >= 100
    plain = sum(all(s.request_id != "long" or s.kind == "decode" for s in r.spans) for r in result.records)
    assert plain > len(result.records) / 2


def test_bad_peers_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", "--peer", "nobody", "--out", str(tmp_path)]) == 2
    assert "error: unknown peer 'nobody'; choose from openvino-genai" in capsys.readouterr().err


def test_a_peer_that_crashes_says_its_last_line(tmp_path: Path) -> None:
    args = Namespace(slots=4, max_len=64)
    with pytest.raises(BenchError, match=r"nobody ended with exit code 1: .*No module named bench.engines"):
        Worker(Peer("nobody", "gguf"), tmp_path, args, tmp_path)


def test_outputs_are_compared_whole() -> None:
    assert peers._equal([[1, 2], [3]], [[1, 2], [4]]) == 1
    assert peers._equal([[1, 2]], ["text"]) is None


def test_a_side_that_runs_twice_counts_as_the_mean_of_its_turns() -> None:
    turns: list[dict[str, Any]] = [
        {"tokens_per_s": 100.0, "utilization": 0.9},
        {"tokens_per_s": 150.0, "utilization": None},
    ]
    assert compare._mean(turns) == {"tokens_per_s": 125.0, "utilization": None}
    assert compare._mean(turns[:1]) == turns[0]


def test_static_batches_need_as_many_steps_as_their_longest_answers() -> None:
    items = [workload.Item(str(n), 0.0, (1,), length) for n, length in enumerate([9, 1, 2, 3, 5, 1])]
    # Pairs: 9 + 3 + 5. Refilled: one slot has the 9, then the last one; the other 1 + 2 + 3 + 5.
    assert compare.fewest_steps(workload.Workload("w", tuple(items)), slots=2) == (17, 11)


def test_peers_are_pinned() -> None:
    for peer in PEERS.values():
        assert all("==" in package for package in peer.packages)


def test_the_page_is_rebuilt_from_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "PAGE", tmp_path / "results.md")
    monkeypatch.setattr(results, "PICTURES", tmp_path / "pictures")
    monkeypatch.setattr(results, "REPO", tmp_path)
    monkeypatch.setattr(results, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text("no markers")
    report = Report("spike", tmp_path / "out" / "spike")
    report.table("Stalls", ["mode", "ms"], [["separate", 1234.5]])
    report.note("What to see: a stall.")
    report.at_most("worst / median", 3.0, 2.0, "x")
    with report.chart() as (_, axes):
        axes.plot([1, 2])
    assert report.finish({}) == 1
    assert main(["results", "--rebuild", "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "results.md").read_text()
    for expected in (
        "## A long prompt among steady decoders",
        "| worst / median | 3x | at most 2x | **missed** |",
        "| separate | 1,234 |",
        "What to see: a stall.",
        "(pictures/spike.png)",
        json.loads((tmp_path / "out/spike/spike.json").read_text())["meta"]["commit"],
    ):
        assert expected in page
    assert (tmp_path / "pictures/spike.png").exists()


def test_nothing_to_rebuild_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["results", "--rebuild", "--out", str(tmp_path)]) == 2
    assert "error: no results in" in capsys.readouterr().err
