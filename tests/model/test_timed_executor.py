"""The executor that only says how long: seconds by rows and cached tokens, on whatever clock."""

from __future__ import annotations

import pytest

from engine_actor.clock import VirtualClock
from engine_actor.engine import Engine
from engine_actor.request import Request
from model.executor import SamplingParams
from model.timed_executor import StepTime, TimedExecutor
from policies.fcfs import Fcfs


def test_a_step_lasts_as_the_step_time_says_on_a_virtual_clock() -> None:
    clock = VirtualClock(100.0)
    step_time = StepTime(fixed=1.0, per_row=0.1, per_cached_token=0.01)
    engine = Engine(TimedExecutor(4, 64, step_time, wait=clock.advance), Fcfs(), clock=clock)
    request = Request("r", [7] * 10, SamplingParams(max_tokens=2), arrival=100.0)
    engine.submit(request)
    _, prefill = engine.step()
    assert prefill.seconds == pytest.approx(1.0 + 10 * 0.1 + 10 * 0.01)
    _, decode = engine.step()
    assert decode.started == pytest.approx(102.1)
    assert decode.seconds == pytest.approx(1.0 + 0.1 + 11 * 0.01)
    assert request.finish_reason == "length"
    assert request.first_token == pytest.approx(102.1)


def test_every_token_is_the_same_and_a_prompt_is_scored_as_certain() -> None:
    engine = Engine(TimedExecutor(1, 16, token=9), Fcfs())
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=3, prompt_logprobs=0))
    engine.submit(request)
    while engine.has_work():
        engine.step()
    assert request.output == [9, 9, 9]
    assert [(score.token, score.logprob) for score in request.prompt_scores] == [(2, 0.0), (3, 0.0)]
