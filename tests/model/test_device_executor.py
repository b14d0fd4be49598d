"""Steps as a GPU runs them, on the CPU: one copy in, one copy out, and the same answers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.exactness import Trail, random_requests, run_alone, run_busy
from engine_actor.engine import Engine
from engine_actor.request import Request
from model.cuda import CudaBackend
from model.device import HostRuntime
from model.device_executor import DeviceExecutor
from model.device_step import BIASES_PER_ROW
from model.executor import Move, SamplingParams
from model.loader import load_model
from model.model_executor import ModelExecutor
from model.transformer import Transformer
from policies.fcfs import Fcfs
from tests.model.test_transformer import VARIANTS, save_random_model

COUNTS = (1, 4, 8, 16, 32)
WAITS = (
    "aten._local_scalar_dense",
    "aten.is_nonzero",
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique2",
    "aten.unique_dim",
    "aten.bincount",
    "aten.equal",
    "aten.repeat_interleave.Tensor",
)
"""What makes the host wait for the device: its result's value or shape is looked at."""


class Watched(HostRuntime):
    """Counts what goes between host and device."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.memories: list[tuple[torch.Tensor, torch.Tensor]] = []

    def memory(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.memories.append(super().memory(nbytes))
        return self.memories[-1]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        on_host = [host.untyped_storage().data_ptr() for host, _ in self.memories]
        self.events.append("out" if target.untyped_storage().data_ptr() in on_host else "in")
        super().copy(target, source)

    def wait(self) -> None:
        self.events.append("wait")

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with NoWaiting():  # type: ignore[no-untyped-call]
                work()

        return run


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that would wait for a device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert not str(func).startswith(WAITS), f"{func} waits for the device"
        if str(func).startswith("aten.index"):
            indices = [index for index in args[1] if index is not None]
            assert all(index.dtype != torch.bool for index in indices), "a mask's size is looked at"
        return func(*args, **(kwargs or {}))


def on_device(path: Path, candidates: tuple[int, ...] = COUNTS) -> Transformer:
    return load_model(path, backend=CudaBackend(torch.device("cpu"), torch.float32, candidates))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    save_random_model(path, "llama")
    return path


@pytest.fixture(scope="module")
def model(saved: Path) -> Transformer:
    return on_device(saved)


def scored(requests: list[Request]) -> list[Request]:
    """The same, but each tells the log-probabilities of its tokens: they are compared to the last bit."""
    for request in requests:
        request.params = replace(request.params, logprobs=2)
    return requests


def ignore(steps: float = 1.0) -> None:
    pass


def run(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        engine.step()
    return {request.id: request.output for request in requests}


@pytest.mark.parametrize("variant", VARIANTS)
def test_company_chunks_and_preemption_change_no_bit(variant: str, tmp_path: Path) -> None:
    save_random_model(tmp_path, variant)
    model = on_device(tmp_path)
    assert model.exact
    kv = model.new_storage(4, 128, poison=True)
    asked = scored(random_requests(random.Random(3), 8, model.vocab_size, 50, 16))
    alone = run_alone(model, kv, asked, ignore, DeviceExecutor(model, kv, HostRuntime()))
    busy: list[Trail] = []
    for mode in ("chunked", "batched"):
        executor = DeviceExecutor(model, kv, HostRuntime())
        busy.append(run_busy(model, kv, asked, random.Random(5), mode, ignore, executor))
        assert len(alone.tokens) == len(busy[-1].tokens)
        assert alone.differs_at(busy[-1]) == []
    assert sum(trail.preemptions for trail in busy) > 0
    assert sum(trail.resumes for trail in busy) > 0


def test_the_answers_are_the_cpu_backends(saved: Path, model: Transformer) -> None:
    reference = load_model(saved, device="cpu")
    asked = scored(random_requests(random.Random(11), 8, model.vocab_size, 50, 16))
    kv, other = model.new_storage(4, 128), reference.new_storage(4, 128)
    found = run_alone(model, kv, asked, ignore, DeviceExecutor(model, kv, HostRuntime()))
    expected = run_alone(reference, other, asked, ignore, ModelExecutor(reference, other))
    assert found.tokens.keys() == expected.tokens.keys()
    for key, sampled in expected.tokens.items():
        assert found.tokens[key].token == sampled.token
        assert abs((found.tokens[key].logprob or 0) - (sampled.logprob or 0)) < 1e-4


def test_a_step_is_one_copy_in_and_one_out_and_never_waits_between(model: Transformer) -> None:
    """With every knob in play, prompts among the decodes and log-probabilities asked for."""
    kv = model.new_storage(4, 128)
    runtime = Watched()
    engine = Engine(DeviceExecutor(model, kv, runtime), Fcfs(), max_step_tokens=32)
    for request in scored(random_requests(random.Random(2), 6, model.vocab_size, 50, 16)):
        request.params = replace(request.params, prompt_logprobs=None)
        engine.submit(request)
    assert runtime.events == []
    mixed = ahead = 0
    while engine.has_work():
        runtime.events.clear()
        _, record = engine.step()
        kinds = {share.kind for share in record.shares}
        mixed += kinds == {"prefill", "decode"}
        # What was computed ahead is waited for; what was not (a newcomer) goes in and out and is waited for;
        # what is computed ahead of the next step goes in and out. A prompt's chunk alone brings nothing out.
        events = " ".join(runtime.events)
        ahead += events == "wait in out"
        assert events
        assert re.fullmatch(r"(wait)?( ?in( out)? wait)?( ?in out)?", events), events
    assert mixed > 0
    assert ahead > 3


def test_what_nobody_asked_for_is_computed_again_or_never_seen(model: Transformer) -> None:
    """Arrivals and departures while the next step is under way change no answer."""
    kv = model.new_storage(3, 64, poison=True)
    requests = [
        Request(f"r{i}", [5 + i] * (1 + i), SamplingParams(max_tokens=4 + 3 * i, temperature=0.9, seed=i))
        for i in range(6)
    ]
    expected: dict[str, list[int]] = {}
    for request in requests:
        again = Request(request.id, request.prompt, request.params)
        expected |= run(Engine(DeviceExecutor(model, kv, HostRuntime()), Fcfs()), [again])
    runtime = Watched()
    engine = Engine(DeviceExecutor(model, kv, runtime), Fcfs())
    for request in requests:
        engine.submit(request)
        for _ in range(3):
            engine.step()
    engine.submit(Request("aborted", [9], SamplingParams(max_tokens=50, temperature=0)))
    for _ in range(9):
        engine.step()
    engine.abort("aborted")
    while engine.has_work():
        engine.step()
    assert {request.id: request.output for request in requests} == expected
    assert runtime.events.count("in") < 2 * engine.steps


def test_a_copied_prefix_brings_its_tokens_for_the_penalties_to_see(model: Transformer) -> None:
    prefix = np.random.default_rng(3).integers(0, model.vocab_size, 24).tolist()
    params = SamplingParams(max_tokens=8, temperature=0.8, repetition_penalty=1.6, logprobs=1)

    def asked() -> list[Request]:
        return [Request(f"r{i}", [*prefix, i], replace(params, seed=i)) for i in range(4)]

    expected: dict[str, list[int]] = {}
    for request in asked():
        kv = model.new_storage(1, 64, poison=True)
        expected |= run(Engine(DeviceExecutor(model, kv, HostRuntime()), Fcfs()), [request])
    moves: list[Move] = []

    class Moved(DeviceExecutor):
        def arrange(self, moves_: Sequence[Move]) -> None:
            moves.extend(moves_)
            super().arrange(moves_)

    engine = Engine(Moved(model, model.new_storage(4, 64, poison=True), HostRuntime()), Fcfs())
    first, *others = asked()
    engine.submit(first)
    for _ in range(4):
        engine.step()
    found = run(engine, others) | {first.id: first.output}
    assert found == expected
    assert any(move.source is not None and move.length > 8 for move in moves)


def test_the_last_place_of_a_slot_is_used_and_none_beyond(model: Transformer) -> None:
    kv = model.new_storage(1, 12, poison=True)
    request = Request("full", [1, 2], SamplingParams(max_tokens=10, temperature=0))
    again = Request("ample", [1, 2], SamplingParams(max_tokens=10, temperature=0))
    output = run(Engine(DeviceExecutor(model, kv, HostRuntime()), Fcfs()), [request])["full"]
    ample = model.new_storage(1, 40)
    assert output == run(Engine(DeviceExecutor(model, ample, HostRuntime()), Fcfs()), [again])["ample"]
    assert len(output) == 10


def test_more_rows_than_there_are_places_for_go_in_passes(model: Transformer) -> None:
    prompt = np.random.default_rng(0).integers(0, model.vocab_size, 90).tolist()
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2, logprobs=2)
    scores, outputs = [], []
    for limit in (None, 7):
        kv = model.new_storage(2, 128)
        runtime = Watched()
        engine = Engine(DeviceExecutor(model, kv, runtime), Fcfs(), mode="chunked", max_step_tokens=limit)
        request = Request("long", prompt, params)
        outputs.append(run(engine, [request]))
        scores.append(request.prompt_scores)
        assert runtime.events.count("in") >= -(-90 // COUNTS[-1])
    assert outputs[0] == outputs[1]
    assert scores[0] == scores[1]
    assert len(scores[0]) == len(prompt) - 1


def test_a_row_of_nan_ends_its_own_request_alone(saved: Path) -> None:
    model = on_device(saved)
    model.weights.embedding(torch.tensor([11]))  # the table is read by index
    table: torch.Tensor = vars(model.weights.embedding)["_table"]
    table[11] = float("nan")
    kv = model.new_storage(3, 32, poison=True)
    engine = Engine(DeviceExecutor(model, kv, HostRuntime()), Fcfs())
    good = [Request(f"good{i}", [i], SamplingParams(max_tokens=5, temperature=0)) for i in range(2)]
    expected: dict[str, list[int]] = {}
    for request in good:
        again = Request(request.id, request.prompt, request.params)
        expected |= run(Engine(DeviceExecutor(model, kv, HostRuntime()), Fcfs()), [again])
    assert all(11 not in output for output in expected.values())
    bad = Request("bad", [11], SamplingParams(max_tokens=5, temperature=0.5))
    for request in (*good, bad):
        engine.submit(request)
    outputs, _ = engine.step()
    (failed,) = [output for output in outputs if output.error]
    assert failed.request_id == "bad"
    assert "not finite" in (failed.error or "")
    while engine.has_work():
        engine.step()
    assert {request.id: request.output for request in good} == expected


def test_as_many_biases_as_there_is_room_for_and_one_more(model: Transformer) -> None:
    room = min(COUNTS[-1] * BIASES_PER_ROW, model.vocab_size)
    kv = model.new_storage(4, 32)
    last = model.vocab_size - 1
    executor = DeviceExecutor(model, kv, HostRuntime())
    executor.step._most_biases = room
    requests = [
        Request(
            f"r{i}",
            [1],
            SamplingParams(
                max_tokens=2,
                temperature=0,
                logit_bias=dict.fromkeys(range(room - 1), -100.0) | {last: 100.0},
                stop_token_ids=stops,
                min_tokens=1,
            ),
        )
        for i, stops in enumerate([(), (), (3,)])
    ]
    run(Engine(executor, Fcfs()), requests)
    assert [request.output for request in requests] == [[last, last], [last, last], []]
    assert [request.finish_reason for request in requests] == ["length", "length", "error"]


def test_a_bias_beyond_the_vocabulary_touches_no_other_row(model: Transformer) -> None:
    kv = model.new_storage(2, 32)
    params = SamplingParams(max_tokens=3, temperature=0)
    bad = Request("bad", [1], replace(params, logit_bias={model.vocab_size: 100.0}))
    good = Request("good", [1], params)
    run(Engine(DeviceExecutor(model, kv, HostRuntime()), Fcfs()), [bad, good])
    assert bad.finish_reason == "error"
    alone = run(Engine(DeviceExecutor(model, kv, HostRuntime()), Fcfs()), [Request("good", [1], params)])
    assert good.output == alone["good"]
