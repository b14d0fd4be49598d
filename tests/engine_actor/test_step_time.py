"""The learned time of a step: right on clean steps, unmoved by stalls; and the budget made of it."""

from __future__ import annotations

import random

import pytest

from engine_actor.clock import VirtualClock
from engine_actor.engine import Engine
from engine_actor.request import Request
from engine_actor.step_time import SETTLED_STEPS, StepTime
from model import timed_executor
from model.executor import SamplingParams
from model.timed_executor import TimedExecutor
from policies.fcfs import Fcfs

TRUE = timed_executor.StepTime(fixed=0.010, per_row=0.001, per_cached_token=2e-6)


def taught(rng: random.Random, steps: int, stalls: float = 0.0) -> StepTime:
    fit = StepTime()
    for _ in range(steps):
        rows, cached = rng.randint(1, 64), rng.randint(10, 8000)
        seconds = TRUE(rows, cached) * rng.uniform(0.97, 1.03)
        fit.observe(rows, cached, seconds + (0.5 if rng.random() < stalls else 0.0))
    return fit


@pytest.mark.parametrize("stalls", [0.0, 0.02])
def test_it_learns_what_a_step_a_row_and_a_cached_token_take(stalls: float) -> None:
    fit = taught(random.Random(1), 600, stalls)
    for rows, cached in ((1, 100), (16, 4000), (64, 8000)):
        assert fit.predict(rows, cached) == pytest.approx(TRUE(rows, cached), rel=0.12)
    budget = fit.rows_within(0.050, 4000)
    assert budget == pytest.approx((0.050 - 0.010 - 0.008) / 0.001, abs=4)


def test_steps_that_are_all_alike_do_not_blow_it_up() -> None:
    fit = taught(random.Random(2), 200)
    for _ in range(5000):
        fit.observe(16, 3000, TRUE(16, 3000))
    assert fit.predict(16, 3000) == pytest.approx(TRUE(16, 3000), rel=0.05)
    for _ in range(50):
        fit.observe(48, 3000, TRUE(48, 3000))
    assert fit.predict(48, 3000) == pytest.approx(TRUE(48, 3000), rel=0.15)


def test_nothing_is_planned_by_a_handful_of_steps() -> None:
    assert not taught(random.Random(3), SETTLED_STEPS - 1).settled
    assert taught(random.Random(3), SETTLED_STEPS + 1).settled


def longest_step(itl_target: float | None, prompt: int = 600) -> float:
    """Of a virtual engine where a long prompt comes among steady decoders; its own first steps aside."""
    clock = VirtualClock()
    executor = TimedExecutor(8, 2048, TRUE, wait=clock.advance)
    engine = Engine(executor, Fcfs(), clock=clock, itl_target=itl_target)
    for index in range(6):
        engine.submit(Request(f"r{index}", [index] * (40 + 20 * index), SamplingParams(max_tokens=400)))
    for _ in range(100):
        engine.step()
    for index in range(2):
        engine.submit(Request(f"long{index}", [9 + index] * prompt, SamplingParams(max_tokens=2)))
        engine.step()
        steps = []
        while engine.running > 6:
            steps.append(engine.step()[1].seconds)
    return max(steps)


def test_a_prompt_gets_as_many_rows_as_the_target_allows() -> None:
    assert longest_step(0.040) == pytest.approx(0.040, rel=0.15)
    assert longest_step(0.080) == pytest.approx(0.080, rel=0.15)


def test_without_a_target_a_prompt_costs_less_than_two_steps_of_a_full_batch() -> None:
    full = TRUE(8, 6 * 300)
    assert 1.3 * full < longest_step(None) <= 2.0 * full


def test_a_target_that_cannot_be_kept_leaves_a_prompt_some_rows() -> None:
    assert longest_step(0.001, prompt=100) < 0.035
