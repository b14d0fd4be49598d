"""The cost of a plan, measured small: real figures under the keys that readers rely on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench import scheduler
from policies import POLICIES


def test_every_policy_is_timed_at_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SIZES", [(4, 10), (8, 20)])
    monkeypatch.setattr(scheduler, "BAR_SIZE", (4, 10))
    monkeypatch.setattr(scheduler, "LONGER_QUEUE", (8, 20))
    monkeypatch.setattr(scheduler, "GROWTH", 1000.0)
    assert bench.main(["scheduler", "--out", str(tmp_path), "--steps", "5"]) == 0
    figures = json.loads((tmp_path / "scheduler.json").read_text())
    for name in POLICIES:
        plans = figures["plan_us"][name]
        assert plans.keys() == {"4x10", "8x20"}
        assert all(0 < plans[size] <= figures["plan_us_p95"][name][size] for size in plans)
    assert (tmp_path / "scheduler.png").stat().st_size > 10_000


def test_a_missed_bar_is_an_error_after_the_results_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "SIZES", [(4, 10), (8, 20)])
    monkeypatch.setattr(scheduler, "BAR_SIZE", (4, 10))
    monkeypatch.setattr(scheduler, "LONGER_QUEUE", (8, 20))
    monkeypatch.setattr(scheduler, "BAR_US", 0.01)
    assert bench.main(["scheduler", "--out", str(tmp_path), "--steps", "5"]) == 1
    assert (tmp_path / "scheduler.json").exists()
