"""The tracing experiment on the toy model: equal blocks, every span out, the promised keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import bare, tracing
from bench.__main__ import main
from engine_actor.engine import Engine
from model.model_executor import ModelExecutor
from policies.fcfs import Fcfs
from tests.fakes import FakeModel, fake_storage


def toy(*_: object, **__: object) -> Engine:
    return Engine(ModelExecutor(FakeModel(), fake_storage(16, 128, poison=False)), Fcfs())


def test_it_reports_the_worse_of_both_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare, "load", lambda path: FakeModel())
    monkeypatch.setattr(bare, "build", toy)
    monkeypatch.setattr(tracing, "MOST_ROUNDS", 2)
    # On the toy model watching is not cheap: only the figures are looked at, not the bar.
    assert main(["tracing", "--out", str(tmp_path), "--rounds", "2"]) in (0, 1)
    result = json.loads((tmp_path / "tracing.json").read_text())
    medians = [sum(values) / 2 for values in result["ratios"].values()]
    assert result["ratio"] == pytest.approx(min(medians), rel=1e-4)
    # A step and four phases each, the stages of 16 requests a block, and the start-up span.
    assert {kind: len(seconds) for kind, seconds in result["seconds"].items()} == dict.fromkeys(
        ("unwatched", "files", "collector"), 2
    )
    expected = 2 * (tracing.OUTPUT_TOKENS * 5 + 16 * 3)
    assert all(count > expected for count in result["spans"].values())
    assert len(set(result["spans"].values())) == 1
    assert result["dropped"] == 0
    assert (tmp_path / "tracing.png").stat().st_size > 10_000
