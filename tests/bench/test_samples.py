"""Turns and pairs: both sides drift alike, and a verdict waits until more pairs would hardly change it."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest

from bench.samples import Pairs, in_turns, mean_of


def test_every_other_round_runs_backwards() -> None:
    played: list[str] = []

    def play(side: str) -> int:
        played.append(side)
        return len(played)

    turns = in_turns({side: partial(play, side) for side in "ab"}, 3)
    assert played == ["a", "b", "b", "a", "a", "b"]
    assert turns == {"a": [1, 4, 5], "b": [2, 3, 6]}


@pytest.mark.parametrize(("settled_after", "rounds"), [(2, 3), (5, 5), (99, 7)])
def test_rounds_go_on_until_they_settle_or_are_too_many(settled_after: int, rounds: int) -> None:
    turns = in_turns({"a": lambda: 0.0}, 3, at_most=7, settled=lambda turns: len(turns["a"]) >= settled_after)
    assert len(turns["a"]) == rounds


def test_a_few_pairs_are_clear_of_no_bound() -> None:
    assert Pairs([9.0] * 5).interval == (-math.inf, math.inf)
    assert not Pairs([9.0] * 5).clear_of(0.98)
    assert Pairs([9.0] * 6).interval == (9.0, 9.0)


def test_the_interval_lies_between_order_statistics() -> None:
    assert Pairs([5.0, 1.0, 3.0, 2.0, 6.0, 4.0]).interval == (1.0, 6.0)
    # A table of the sign test: of 20 values the sixth from either end.
    assert Pairs([float(x) for x in range(1, 21)]).interval == (6.0, 15.0)
    assert Pairs([float(x) for x in range(1, 21)]).median == 10.5


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    rng = random.Random(0)
    held = 0
    for _ in range(400):
        low, high = Pairs([rng.lognormvariate(0, 1) for _ in range(12)]).interval
        held += low <= 1.0 <= high
    assert held >= 0.95 * 400


def test_pairs_are_clear_of_a_bound_outside_their_interval() -> None:
    pairs = Pairs.ratios([0.99, 1.0, 1.01, 1.0, 0.99, 1.02], [1.0] * 6)
    assert pairs.clear_of(0.98)
    assert not pairs.clear_of(1.0)
    assert str(pairs) == "1.000, the median of 6 pairs (0.990 to 1.020)"


def test_a_mean_is_none_where_a_turn_has_none() -> None:
    turns: list[dict[str, float | None]] = [
        {"rate": 100.0, "utilization": 0.9},
        {"rate": 150.0, "utilization": None},
    ]
    assert mean_of(turns) == {"rate": 125.0, "utilization": None}
