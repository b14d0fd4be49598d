"""The experiment with an open page, on the toy engine: windows in turns, tokens counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import watching
from bench.__main__ import main
from bench.report import BenchError
from tests.bench.fake_server import FakeServer
from tests.observed import ObservedServer, RunningEngine, observed_server, offer_load


def test_windows_alternate_and_count_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RunningEngine("engine-0", step_seconds=0.01)

    @contextmanager
    def toy_served() -> Iterator[ObservedServer]:
        with observed_server({"engine-0": engine}) as server:
            yield server

    @contextmanager
    def load(url: str) -> Iterator[None]:
        offer_load(engine, 400)
        yield

    monkeypatch.setattr(watching, "served", toy_served)
    monkeypatch.setattr(watching, "_streams", load)
    monkeypatch.setattr(watching, "MOST_ROUNDS", 2)
    monkeypatch.setattr(watching, "FILL_SECONDS", 0.2)
    monkeypatch.setattr(watching, "SETTLE_SECONDS", 0.5)
    # Half a second says nothing about the cost: only the figures are looked at, not the bar.
    assert main(["watching", "--out", str(tmp_path), "--rounds", "2", "--window", "0.5"]) in (0, 1)
    result = json.loads((tmp_path / "watching.json").read_text())
    for shares in result["shares"].values():
        assert len(shares) == 2
        assert all(0 <= share < 1 for share in shares)
    for rates in result["tokens_per_s"].values():
        assert all(rate > 50 for rate in rates)
    assert engine.view.asked > 5
    ratios = sorted(result["tokens_per_s_ratios"])
    assert ratios[0] <= result["tokens_per_s_ratio"] <= ratios[-1]


def test_a_page_that_fails_fails_the_bench() -> None:
    with (
        FakeServer().running() as fake,
        pytest.raises(BenchError, match="/live answered 404"),
        watching._page(fake.url),
    ):
        pass
