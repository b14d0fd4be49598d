"""The loop, on a toy model: what joins, what leaves, and that company never changes an answer."""

from __future__ import annotations

import logging
import math
import weakref

import pytest
import torch

from engine_actor.engine import Engine, RequestRefusedError
from engine_actor.request import Request
from engine_actor.scheduler import Mode
from model.batch import Batch
from model.executor import DeviceLostError, SamplingParams
from model.model_executor import ModelExecutor
from model.storage import SlotStorage
from policies.fcfs import Fcfs
from policies.static import Static
from tests.fakes import FakeModel, fake_storage


def request(name: str, prompt: list[int], max_tokens: int, arrival: float = 0.0) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0), arrival=arrival)


def run(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    for item in requests:
        engine.submit(item)
    for _ in range(1000):
        if not engine.has_work():
            return {item.id: item.output for item in requests}
        engine.step()
    raise AssertionError("the engine did not finish")


@pytest.mark.parametrize("mode", ["separate", "batched", "chunked"])
@pytest.mark.parametrize("budget", [None, 48])
def test_company_does_not_change_an_answer(mode: Mode, budget: int | None) -> None:
    def prompts() -> list[Request]:
        return [request(f"r{i}", list(range(i, i + 1 + i)), 4 + 6 * i, float(i)) for i in range(7)]

    alone: dict[str, list[int]] = {}
    for item in prompts():
        alone |= run(Engine(ModelExecutor(FakeModel(), fake_storage()), Fcfs()), [item])
    engine = Engine(
        ModelExecutor(FakeModel(), fake_storage()), Fcfs(), mode=mode, max_step_tokens=6, kv_budget=budget
    )
    busy = prompts()
    assert run(engine, busy) == alone
    assert (sum(item.num_preemptions for item in busy) > 0) == (budget is not None)
    assert engine.slots.free == engine.slots.count
    assert engine.slots.tokens == 0


def test_a_finished_request_frees_its_slot_in_the_same_step() -> None:
    engine = Engine(ModelExecutor(FakeModel(), fake_storage(num_slots=1)), Fcfs())
    engine.submit(request("a", [1, 2], 1))
    engine.submit(request("b", [3], 2, 1.0))
    outputs, record = engine.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", "length")]
    assert record.finished == ["a"]
    assert record.free_slots == 1
    _, record = engine.step()
    assert record.admitted == ["b"]


def test_a_record_says_what_each_part_of_a_step_took_and_which_forward_served_whom() -> None:
    engine = Engine(ModelExecutor(FakeModel(), fake_storage()), Fcfs(), mode="separate")
    run(engine, [request("early", [1], 1)])
    engine.submit(request("steady", [1], 5))
    engine.step()
    engine.submit(request("b", [2, 3], 5, 1.0))
    engine.submit(request("c", [4, 5, 6], 5, 2.0))
    _, record = engine.step()
    names = [interval.phase for interval in record.intervals]
    assert names == ["admit", "prefill", "sample", "prefill", "sample", "decode", "sample", "retire"]
    assert [(span.request_id, span.forward) for span in record.shares] == [("b", 0), ("c", 1), ("steady", 2)]
    ends = [interval.offset + interval.seconds for interval in record.intervals]
    assert all(end <= later.offset for end, later in zip(ends, record.intervals[1:], strict=False))
    assert record.seconds == pytest.approx(ends[-1])
    assert record.phases["sample"] == pytest.approx(
        sum(interval.seconds for interval in record.intervals if interval.phase == "sample")
    )


def test_a_request_that_can_never_fit_is_refused_with_both_lengths() -> None:
    engine = Engine(ModelExecutor(FakeModel(), fake_storage(max_len=16)), Fcfs())
    engine.submit(request("fits", [1] * 10, 6))
    with pytest.raises(RequestRefusedError, match=r"prompt \(10 tokens\).*17.*16 tokens"):
        engine.submit(request("too long", [1] * 10, 7))


@pytest.mark.parametrize("token", [-1, FakeModel.vocab_size])
def test_a_token_outside_the_vocabulary_is_refused_before_it_can_fail_a_whole_forward(token: int) -> None:
    engine = Engine(ModelExecutor(FakeModel(), fake_storage()), Fcfs())
    with pytest.raises(RequestRefusedError, match="token ids go from 0 to 96"):
        engine.submit(request("absurd", [1, token], 3))
    assert not engine.has_work()


def test_a_failed_forward_ends_its_requests_and_the_loop_goes_on() -> None:
    model = FakeModel()
    engine = Engine(ModelExecutor(model, fake_storage()), Fcfs())
    engine.submit(request("bad", [1], 3))
    model.forward = lambda batch, kv: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    outputs, record = engine.step()
    assert record.errors == 1
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("bad", "error")]
    assert "division by zero" in (outputs[0].error or "")
    engine.executor = ModelExecutor(FakeModel(), fake_storage())
    assert len(run(engine, [request("good", [1], 3)])["good"]) == 3
    assert engine.slots.free == engine.slots.count


class FailsFor(FakeModel):
    """Refuses whole forwards in which somebody says 11, or any forward but those of one request."""

    def __init__(self, *, crowds: bool = False) -> None:
        super().__init__()
        self.crowds = crowds

    def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
        if self.crowds and len(set(batch.slots)) > 1:
            raise torch.OutOfMemoryError("too many rows")
        if 11 in batch.tokens:
            raise ValueError("11 is not to be said")
        return super().forward(batch, storage)


@pytest.mark.parametrize("mode", ["separate", "batched", "chunked"])
@pytest.mark.parametrize("crowds", [False, True])
def test_a_failed_forward_ends_the_culprit_and_changes_nobodys_answer(mode: Mode, crowds: bool) -> None:
    def good() -> list[Request]:
        return [request(f"good{i}", [i] * (1 + i), 6, float(i)) for i in range(3)]

    expected = run(Engine(ModelExecutor(FakeModel(), fake_storage()), Fcfs()), good())
    engine = Engine(ModelExecutor(FailsFor(crowds=crowds), fake_storage()), Fcfs(), mode=mode)
    for item in (requests := good()):
        engine.submit(item)
    engine.step()
    engine.submit(request("bad", [5, 11], 6))
    outputs, record = engine.step()
    assert [o.request_id for o in outputs if o.finish_reason == "error"] == ["bad"]
    assert {span.request_id for span in record.shares if span.sampled} == {item.id for item in requests}
    while engine.has_work():
        engine.step()
    assert {item.id: item.output for item in requests} == expected
    assert engine.slots.free == engine.slots.count


def test_a_failed_forward_lets_go_of_its_memory_before_it_is_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # It would keep the error and, with it, the memory.
    caplog.set_level(logging.CRITICAL, "model.model_executor")

    class Large(torch.Tensor):
        pass

    class Hoards(FakeModel):
        held: weakref.ref[Large] | None = None

        def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
            if len(set(batch.slots)) > 1:
                activations = Large(9)
                self.held = weakref.ref(activations)
                raise torch.OutOfMemoryError("too many rows")
            assert self.held is None or self.held() is None
            return super().forward(batch, storage)

    model = Hoards()
    engine = Engine(ModelExecutor(model, fake_storage()), Fcfs())
    outputs = run(engine, [request(f"r{i}", [i], 3) for i in range(3)])
    assert model.held is not None
    assert {len(output) for output in outputs.values()} == {3}


def test_a_request_that_the_sampler_chokes_on_ends_alone() -> None:
    engine = Engine(ModelExecutor(FakeModel(), fake_storage()), Fcfs())
    good = request("good", [1], 3)
    absurd = Request("absurd", [2], SamplingParams(temperature=1, frequency_penalty="much"))  # type: ignore[arg-type]
    for item in (good, absurd):
        engine.submit(item)
    while engine.has_work():
        assert engine.step()[1].errors == 0
    assert (good.finish_reason, absurd.finish_reason) == ("length", "error")


def test_a_device_that_is_lost_ends_the_loop_and_no_request() -> None:
    class Lost(FakeModel):
        def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    engine = Engine(ModelExecutor(Lost(), fake_storage()), Fcfs())
    engine.submit(item := request("innocent", [1], 3))
    with pytest.raises(DeviceLostError):
        engine.step()
    assert item.finish_reason is None


def test_an_answer_ends_with_a_stop_token_once_it_is_long_enough() -> None:
    whole = request("whole", [1, 2], 9)
    run(Engine(ModelExecutor(FakeModel(), fake_storage()), Fcfs()), [whole])
    for min_tokens in range(9):
        params = SamplingParams(
            max_tokens=9, temperature=0, stop_token_ids=(whole.output[2],), min_tokens=min_tokens
        )
        stopped = Request("stopped", [1, 2], params)
        run(Engine(ModelExecutor(FakeModel(), fake_storage()), Fcfs()), [stopped])
        if min_tokens <= 2:
            assert (stopped.output, stopped.finish_reason) == (whole.output[:3], "stop")
        else:
            assert len(stopped.output) > min_tokens or stopped.finish_reason == "length"
            assert stopped.output[2] != whole.output[2]


class BrokenFor(FakeModel):
    """Answers NaN to whoever says 11."""

    def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
        logits = super().forward(batch, storage)
        logits[batch.tokens[batch.logit_rows] == 11] = math.nan
        return logits


def test_invalid_logits_end_their_own_request_alone() -> None:
    def good() -> list[Request]:
        return [request(f"good{i}", [i], 6, float(i)) for i in range(3)]

    expected = run(Engine(ModelExecutor(FakeModel(), fake_storage()), Fcfs()), good())
    engine = Engine(ModelExecutor(BrokenFor(), fake_storage(num_slots=5)), Fcfs(), mode="batched")
    for params in (SamplingParams(temperature=0), SamplingParams(prompt_logprobs=1)):
        engine.submit(Request("bad", [5, 11, 11], params))
        for item in (requests := good()):
            engine.submit(item)
        outputs, record = engine.step()
        failed = [o for o in outputs if o.finish_reason == "error"]
        assert [(o.request_id, o.sampled) for o in failed] == [("bad", None)]
        assert "not finite" in (failed[0].error or "")
        # To be scored it has a forward of its own, of which nothing is left.
        assert record.errors == (params.prompt_logprobs is not None)
        while engine.has_work():
            engine.step()
        assert {item.id: item.output for item in requests} == expected
        assert engine.slots.free == engine.slots.count


def test_a_step_of_invalid_logits_counts_as_failed() -> None:
    engine = Engine(ModelExecutor(BrokenFor(), fake_storage()), Fcfs())
    engine.submit(request("bad", [11], 3))
    outputs, record = engine.step()
    assert record.errors == 1
    assert outputs[0].finish_reason == "error"


def test_abort_frees_the_slot_at_once_running_or_waiting() -> None:
    engine = Engine(ModelExecutor(FakeModel(), fake_storage(num_slots=1)), Fcfs())
    engine.submit(request("running", [1], 9))
    engine.submit(request("waiting", [1], 9, 1.0))
    engine.step()
    assert engine.abort("waiting")
    assert engine.abort("running")
    assert not engine.abort("running")
    assert not engine.has_work()
    assert engine.slots.free == 1


def test_a_static_batch_may_hold_more_slots_than_a_slot_has_positions() -> None:
    """The finished rows of a batch are padding, and padding has no length of its own."""
    model = FakeModel()
    engine = Engine(ModelExecutor(model, fake_storage(num_slots=20, max_len=8)), Static(), mode="batched")
    requests = [request(f"r{i}", [i], 1 + 2 * (i == 0)) for i in range(20)]
    assert [len(output) for output in run(engine, requests).values()] == [3] + [1] * 19
    assert max(batch.positions.max() for batch in model.forwards) < 8


@pytest.mark.parametrize("mode", ["separate", "batched", "chunked"])
def test_a_prompt_to_be_scored_goes_in_pieces(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scored row brings logits as wide as the vocabulary, so a forward holds only so many."""
    monkeypatch.setattr("engine_actor.scheduler.MAX_SCORED_ROWS", 8)
    model = FakeModel()
    engine = Engine(ModelExecutor(model, fake_storage()), Fcfs(), mode=mode, max_step_tokens=40)
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0)
    scored = Request("scored", list(range(30)), params)
    plain = request("plain", list(range(30)), 2)
    assert run(engine, [scored, plain])["scored"] == scored.output == plain.output
    assert [score.token for score in scored.prompt_scores] == list(range(1, 30))
    assert max(len(batch.logit_rows) for batch in model.forwards) <= 8 + 1


def test_prompts_to_be_scored_share_what_one_forward_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_actor.scheduler.MAX_SCORED_ROWS", 8)
    model = FakeModel()
    engine = Engine(ModelExecutor(model, fake_storage()), Fcfs(), max_step_tokens=60)
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0)
    scored = [Request(f"scored{i}", list(range(i, i + 20)), params) for i in range(3)]
    run(engine, [*scored, request("plain", list(range(20)), 2)])
    assert all(len(item.prompt_scores) == 19 for item in scored)
    assert max(len(batch.logit_rows) for batch in model.forwards) <= 8 + 4
    assert len(model.forwards[0]) == 8 + 20, "who is not to be scored need not wait"
