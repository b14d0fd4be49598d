"""Requests are placed, followed, dropped, and outlive their engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch

from app import connection, engine_client
from app.engine_client import EngineClient, NoEngineError, QueueFullError
from app.engine_port import DirectoryLostError, EngineLostError, NotAttachedError
from app.generation import Generation
from engine_actor.engine import Engine
from engine_actor.messages import LEASE_SECONDS, EngineFailedError, EngineInfo, EngineStatus, Frame
from engine_actor.request import Request
from model.batch import Batch
from model.executor import SamplingParams
from model.model_executor import ModelExecutor
from model.storage import SlotStorage
from tests.app.engines import POISON, LocalDirectory, LocalEngine, PacedModel, build_toy
from tests.fakes import fake_storage


def request(name: str, prompt: list[int], max_tokens: int, *, seed: int = 0) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.9, seed=seed, prompt_logprobs=0)
    return Request(name, prompt, params)


@asynccontextmanager
async def client_of(
    directory: LocalDirectory, engines: int = 1, replica: str = "replica"
) -> AsyncIterator[EngineClient]:
    client = EngineClient(replica, engines, directory, directory.max_waiting)
    await client.start()
    try:
        yield client
    finally:
        await client.stop()
        directory.stop()


async def tokens_of(generation: Generation) -> list[list[int]]:
    tokens: dict[int, list[int]] = {flight.sequence: [] for flight in generation.flights}
    scores = dict.fromkeys(tokens, 0)
    async for sequence, output in generation:
        assert output.error is None
        assert output.sampled is not None
        assert output.index == len(tokens[sequence])
        tokens[sequence].append(output.sampled.token)
        scores[sequence] += len(output.prompt_scores)
    assert all(scores[f.sequence] == f.request.prompt_len - 1 for f in generation.flights)
    return list(tokens.values())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def requests(count: int, max_tokens: int = 20) -> list[Request]:
    return [request(f"r{i}", [i + 1, 5, 9], max_tokens, seed=i) for i in range(count)]


def test_many_requests_on_two_engines_get_what_one_gets_alone() -> None:
    async def scenario() -> None:
        async with client_of(LocalDirectory(build_toy())) as client:
            alone = [(await tokens_of(await client.generate([each])))[0] for each in requests(9)]
        directory = LocalDirectory(build_toy(seconds=0.002))
        async with client_of(directory, engines=2) as client:
            await until(lambda: None not in client.statuses().values())
            together = await tokens_of(await client.generate(requests(9)))
            assert together == alone
            assert all(engine.actor._steps.status().steps > 0 for engine in directory.engines.values())

    run(scenario())


@pytest.mark.parametrize("engines", [1, 2])
def test_a_killed_engine_costs_no_token_and_repeats_none(engines: int) -> None:
    async def scenario() -> None:
        async with client_of(LocalDirectory(build_toy())) as client:
            expected = await tokens_of(await client.generate(requests(6)))
        directory = LocalDirectory(build_toy(seconds=0.005))
        async with client_of(directory, engines) as client:
            await until(lambda: None not in client.statuses().values())
            generation = await client.generate(requests(6))
            reading = asyncio.ensure_future(tokens_of(generation))
            await until(lambda: all(len(flight.tokens) >= 3 for flight in generation.flights[:4]))
            assert not generation.flights[0].over
            directory.engines[0].kill()
            assert await reading == expected

    run(scenario())


def test_the_engine_that_goes_on_counts_each_prompt_once_and_every_gap() -> None:
    async def scenario() -> None:
        directory = LocalDirectory(build_toy(seconds=0.005))
        async with client_of(directory) as client:
            generation = await client.generate(requests(6))
            reading = asyncio.ensure_future(tokens_of(generation))
            await until(lambda: all(len(flight.tokens) >= 3 for flight in generation.flights[:4]))
            directory.engines[0].kill()
            await reading
            figures = await directory.engines[0].actor.figures()
            counted = {
                sample.name: sample.value
                for family in figures
                for sample in family.samples
                if sample.labels.get("tenant") == "default"
            }
            # Four had begun on the engine before.
            assert counted["slotserve_prompt_tokens_total"] == 2 * 3
            assert counted["slotserve_time_to_first_token_seconds_count"] == 2
            gaps = counted["slotserve_inter_token_latency_seconds_count"]
            assert gaps == counted["slotserve_output_tokens_total"] - 2

    run(scenario())


def test_a_request_that_outlives_too_many_engines_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "REATTACH_SECONDS", 0.01)

    async def scenario() -> None:
        directory = LocalDirectory(build_toy(seconds=0.02))
        async with client_of(directory) as client:
            generation = await client.generate(requests(1, max_tokens=60))

            async def kill_again_and_again() -> None:
                for _ in range(engine_client.MAX_RESUMES + 1):
                    engine = directory.engines[0]
                    await until(lambda e=engine: e.actor._steps.status().running > 0)  # type: ignore[misc]
                    engine.kill()
                    await until(lambda e=engine: directory.engines[0] is not e)  # type: ignore[misc]

            killing = asyncio.ensure_future(kill_again_and_again())
            last = [output async for _, output in generation][-1]
            assert last.finish_reason == "error"
            assert "4 engines died" in (last.error or "")
            await killing

    run(scenario())


def test_a_request_that_kills_engines_takes_no_other_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "REATTACH_SECONDS", 0.01)
    deaths = 0

    async def scenario() -> None:
        async with client_of(LocalDirectory(build_toy())) as client:
            expected = await tokens_of(await client.generate(requests(6)))

        def kill(engine: LocalEngine) -> None:
            nonlocal deaths
            deaths += not engine.dead.is_set()
            engine.kill()

        class Killed(PacedModel):
            engine: LocalEngine | None = None

            def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
                # What fails is tried again alone: by then another engine may have taken this one's place.
                self.engine = self.engine or directory.engines[0]
                if ((batch.tokens == POISON) & (batch.positions == 0)).any():
                    loop.call_soon_threadsafe(kill, self.engine)
                return super().forward(batch, storage)

        def build() -> tuple[Engine, EngineInfo]:
            engine, info = build_toy(num_slots=8)()
            engine.executor = ModelExecutor(Killed(0.005), fake_storage(8, 64))
            return engine, info

        loop = asyncio.get_running_loop()
        directory = LocalDirectory(build)
        poison = [request(f"p{i}", [POISON, 1], 4) for i in range(2)]
        innocent = requests(6)
        texts: dict[int, list[int]] = {i: [] for i in range(len(innocent) + len(poison))}
        errors: dict[int, str | None] = {}
        async with client_of(directory) as client:
            async for sequence, output in await client.generate([*innocent[:3], *poison, *innocent[3:]]):
                if output.sampled is not None:
                    texts[sequence].append(output.sampled.token)
                else:
                    errors[sequence] = output.error
        message = "4 engines died while they worked on this request"
        assert errors == {3: message, 4: message}
        assert [*list(texts.values())[:3], *list(texts.values())[5:]] == expected
        # Together twice, then each by itself.
        assert deaths == engine_client.SUSPECT_RESUMES + len(poison) * (
            engine_client.MAX_RESUMES + 1 - engine_client.SUSPECT_RESUMES
        )

    run(scenario())


def test_dropped_requests_are_gone_within_two_steps_running_or_waiting() -> None:
    async def scenario() -> None:
        directory = LocalDirectory(build_toy(seconds=0.02, num_slots=2))
        async with client_of(directory) as client:
            generation = await client.generate(requests(4, max_tokens=60))
            steps = directory.engines[0].actor._steps
            await until(lambda: steps.status().running == 2)
            before = steps.status().steps
            generation.close()
            await until(lambda: steps.status().running == steps.status().waiting == 0)
            assert steps.status().steps - before <= 2
            assert steps.status().free_kv == 2 * 64
            assert [item async for item in generation] == []

    run(scenario())


def test_requests_dropped_while_no_engine_lives_are_not_resumed() -> None:
    async def scenario() -> None:
        directory = LocalDirectory(build_toy(seconds=0.01))
        async with client_of(directory) as client:
            dropped = await client.generate(requests(1, max_tokens=60))
            directory.restarting = False
            directory.engines[0].kill()
            await until(lambda: client.statuses() == {"engine-0": None})
            with pytest.raises(NoEngineError):
                await client.generate([request("late", [1, 2], 2)])
            dropped.close()
            directory.restarting = True
            await until(lambda: client.statuses() != {"engine-0": None})
            await asyncio.sleep(0.1)
            assert directory.engines[0].actor._steps.status().steps == 0

    run(scenario())


def test_the_queue_is_bounded_and_takes_all_or_none() -> None:
    async def scenario() -> None:
        directory = LocalDirectory(build_toy(seconds=0.01, num_slots=2), max_waiting=3)
        async with client_of(directory) as client:
            full = await client.generate(requests(5))
            with pytest.raises(QueueFullError, match="5 requests run or wait here, and 5 is the limit"):
                await client.generate([request("one too many", [1, 2], 2)])
            full.end(0)
            await until(lambda: directory.engines[0].actor._steps._accepted == 4)
            with pytest.raises(QueueFullError):
                await client.generate([request("two", [1, 2], 2), request("three", [1, 2], 2)])
            await until(lambda: directory.engines[0].actor._steps._accepted == 4)
            await client.generate([request("fits", [1, 2], 2)])

    run(scenario())


@pytest.mark.parametrize("at_once", [False, True])
def test_nobody_is_refused_before_the_queues_of_all_engines_are_full(at_once: bool) -> None:
    async def scenario() -> None:
        directory = LocalDirectory(build_toy(seconds=0.02, num_slots=2), max_waiting=1)
        async with client_of(directory, engines=2) as client:
            await until(lambda: None not in client.statuses().values())
            # By free KV alone all short ones would go where the long one is not.
            six = [
                request("long", [1] * 40, 24),
                *(request(f"short-{i}", [i + 1, 5], 50) for i in range(5)),
            ]
            for together in [six] if at_once else [[each] for each in six]:
                await client.generate(together)
            assert [engine.actor._steps._accepted for engine in directory.engines.values()] == [3, 3]
            with pytest.raises(QueueFullError, match="3 requests run or wait here, and 3 is the limit"):
                await client.generate([request("one too many", [1, 2], 2)])

    run(scenario())


def test_what_one_engine_refuses_is_offered_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(replica: str, requests: Sequence[Request], again: bool) -> str:
        return "other replicas have filled the queue"

    async def scenario() -> None:
        async with client_of(LocalDirectory(build_toy())) as client:
            expected = await tokens_of(await client.generate(requests(4)))
        directory = LocalDirectory(build_toy())
        async with client_of(directory, engines=2) as client:
            await until(lambda: None not in client.statuses().values())
            monkeypatch.setattr(directory.engines[0], "submit", full)
            assert await tokens_of(await client.generate(requests(4))) == expected
            monkeypatch.setattr(directory.engines[1], "submit", full)
            with pytest.raises(QueueFullError, match="other replicas"):
                await client.generate(requests(4))
            assert not any(connection.flights for connection in client._connections)

    run(scenario())


def test_an_engine_that_does_not_take_requests_in_time_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "SUBMIT_SECONDS", 0.05)
    aborted: list[str] = []

    async def frozen(replica: str, requests: Sequence[Request], again: bool) -> None:
        await asyncio.Event().wait()

    async def abort(request_ids: Sequence[str], reason: str) -> None:
        aborted.extend(request_ids)

    async def scenario() -> None:
        async with client_of(LocalDirectory(build_toy())) as client:
            expected = await tokens_of(await client.generate(requests(4)))
        directory = LocalDirectory(build_toy())
        async with client_of(directory, engines=2) as client:
            await until(lambda: None not in client.statuses().values())
            monkeypatch.setattr(directory.engines[0], "submit", frozen)
            monkeypatch.setattr(directory.engines[0], "abort", abort)
            assert await tokens_of(await client.generate(requests(4))) == expected
            assert aborted
            monkeypatch.setattr(directory.engines[1], "submit", frozen)
            with pytest.raises(NoEngineError, match=r"has not answered for 0\.05 s"):
                await client.generate(requests(4))

    run(scenario())


def test_an_engine_that_says_too_late_that_it_took_requests_leaves_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Frames overtake the answer: whoever goes on elsewhere does so from the tokens that came."""
    monkeypatch.setattr(engine_client, "SUBMIT_SECONDS", 0.2)
    resumed: list[int] = []

    async def scenario() -> None:
        async with client_of(LocalDirectory(build_toy())) as client:
            expected = await tokens_of(await client.generate(requests(2, max_tokens=30)))
        directory = LocalDirectory(build_toy(seconds=0.03))
        async with client_of(directory, engines=2) as client:
            await until(lambda: None not in client.statuses().values())
            first, second = directory.engines[0].submit, directory.engines[1].submit

            async def late(replica: str, sent: Sequence[Request], again: bool) -> None:
                await first(replica, sent, again)
                await asyncio.Event().wait()

            async def noted(replica: str, sent: Sequence[Request], again: bool) -> str | None:
                resumed.extend(len(request.resumed) for request in sent)
                return await second(replica, sent, again)

            monkeypatch.setattr(directory.engines[0], "submit", late)
            monkeypatch.setattr(directory.engines[1], "submit", noted)
            assert await tokens_of(await client.generate(requests(2, max_tokens=30))) == expected
            assert any(resumed)

    run(scenario())


def test_a_silent_replica_loses_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_actor.actor.LEASE_SECONDS", 0.2)
    monkeypatch.setattr("app.engine_client.LEASE_SECONDS", 1000.0)

    async def scenario() -> None:
        directory = LocalDirectory(build_toy(seconds=0.05))
        async with client_of(directory) as client:
            generation = await client.generate(requests(1, max_tokens=60))
            status = directory.engines[0].actor._steps.status
            await until(lambda: status().running == 1)
            for task in client._background:
                task.cancel()  # as if the process had been killed
            await until(lambda: status().running == 0)
            assert not generation.flights[0].over

    run(scenario())


def test_a_replica_whose_lease_ran_out_attaches_anew_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with client_of(LocalDirectory(build_toy())) as client:
            expected = await tokens_of(await client.generate(requests(4)))
        directory = LocalDirectory(build_toy(seconds=0.02))
        async with client_of(directory) as client:
            generation = await client.generate(requests(2))
            reading = asyncio.ensure_future(tokens_of(generation))
            await until(lambda: len(generation.flights[0].tokens) > 2)
            directory.engines[0].actor._detach("replica")
            # Sent before the client can know.
            late = await client.generate(requests(4)[2:])
            assert await reading + await tokens_of(late) == expected

    run(scenario())


@pytest.mark.parametrize("taken", [True, False])
def test_what_is_sent_while_a_replica_attaches_anew_is_sent_on_once(
    monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    async def scenario() -> None:
        async with client_of(LocalDirectory(build_toy())) as client:
            expected = await tokens_of(await client.generate(requests(4)))
        directory = LocalDirectory(build_toy(seconds=0.005))
        async with client_of(directory) as client:
            engine, connection = directory.engines[0], client._connections[0]
            frames, submit = engine.frames, engine.submit
            attached, heard = asyncio.Event(), asyncio.Event()

            async def slow_frames(replica: str) -> AsyncIterator[Frame]:
                async for frame in frames(replica):
                    if frame.attached:
                        attached.set()
                        await heard.wait()
                    yield frame

            async def slow_refusal(replica: str, requests: Sequence[Request], again: bool) -> None:
                monkeypatch.setattr(engine, "submit", submit)
                heard.set()
                await until(lambda: connection.attachments == 2)
                raise NotAttachedError("the replica was not attached yet")

            monkeypatch.setattr(engine, "frames", slow_frames)
            before = await client.generate(requests(2))
            await until(lambda: len(before.flights[0].tokens) > 2)
            engine.actor._detach("replica")
            await attached.wait()
            if not taken:
                monkeypatch.setattr(engine, "submit", slow_refusal)
            after = await client.generate(requests(4)[2:])
            heard.set()
            assert await tokens_of(before) + await tokens_of(after) == expected
            assert [flight.resumes for flight in after.flights] == [0 if taken else 1] * 2

    run(scenario())


def test_a_lease_is_kept_through_errors_and_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_actor.actor.LEASE_SECONDS", 0.5)
    monkeypatch.setattr(engine_client, "LEASE_SECONDS", 0.5)

    async def scenario() -> None:
        directory = LocalDirectory(build_toy(seconds=0.01))
        async with client_of(directory) as client:
            engine = directory.engines[0]
            renew, calls = engine.renew, 0

            async def unsteady(replica: str) -> EngineStatus:
                nonlocal calls
                calls += 1
                if calls % 3 == 1:
                    raise EngineLostError("a connection was reset")
                if calls % 3 == 2:
                    await asyncio.Event().wait()
                return await renew(replica)

            monkeypatch.setattr(engine, "renew", unsteady)
            generation = await client.generate(requests(1, max_tokens=60))
            await tokens_of(generation)
            await until(lambda: calls > 6)
            # Its requests outlived several terms, and the engine has not forgotten the replica.
            assert client._connections[0].attachments == 1

    run(scenario())


def test_what_cannot_be_resumed_ends_with_an_error_and_the_cause_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[object] = []
    monkeypatch.setattr(engine_client.log, "error", lambda _, exc_info: logged.append(exc_info))

    async def scenario() -> None:
        directory = LocalDirectory(build_toy(seconds=0.02))
        async with client_of(directory) as client:
            generation = await client.generate(requests(1, max_tokens=60))
            await until(lambda: len(generation.flights[0].tokens) > 2)
            bug = ZeroDivisionError("a bug")
            monkeypatch.setattr(client, "_place", AsyncMock(side_effect=bug))
            directory.engines[0].kill()
            async with asyncio.timeout(10):
                last = [output async for _, output in generation][-1]
            assert last.finish_reason == "error"
            assert last.error == "it could not be resumed: a bug"
            await until(lambda: logged == [bug])

    run(scenario())


def test_a_silent_engine_counts_as_stalled_and_gets_no_more_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(engine_client, "LEASE_SECONDS", 0.1)
    monkeypatch.setattr(connection, "LEASE_SECONDS", 0.1)
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: now))

    async def scenario() -> None:
        nonlocal now
        directory = LocalDirectory(build_toy())
        async with client_of(directory, engines=2) as client:
            await until(lambda: None not in client.statuses().values())
            frozen, waiting = directory.engines[0], asyncio.Event()

            async def say_nothing(replica: str) -> None:
                waiting.set()
                await asyncio.Event().wait()

            monkeypatch.setattr(frozen, "renew", say_nothing)
            await waiting.wait()
            now = 5.0
            await until(lambda: client._connections[1].heard == now)
            statuses = client.statuses()
            assert statuses["engine-0"] is not None
            assert statuses["engine-1"] is not None
            assert statuses["engine-0"].stalled == 5
            assert statuses["engine-1"].stalled == 0
            await tokens_of(await client.generate(requests(4)))
            assert frozen.actor._steps.status().steps == 0

    run(scenario())


@pytest.mark.parametrize(("stalled", "steps"), [(0.0, 20), (LEASE_SECONDS, 20), (LEASE_SECONDS + 0.1, 0)])
def test_an_engine_whose_steps_do_not_end_gets_no_more_work(stalled: float, steps: int) -> None:
    async def scenario() -> None:
        directory = LocalDirectory(build_toy())
        async with client_of(directory, engines=2) as client:
            await until(lambda: None not in client.statuses().values())
            client._connections[0].status = EngineStatus(free_kv=1000, stalled=stalled)
            await tokens_of(await client.generate(requests(1)))
            assert directory.engines[0].actor._steps.status().steps == steps

    run(scenario())


@pytest.mark.parametrize("dying", [[2], [2, 0]])
def test_a_request_goes_on_where_bits_are_the_same_if_it_can(
    dying: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(engine_client.log, "warning", lambda text, *args: said.append(text % args))

    async def scenario() -> None:
        directory = LocalDirectory(build_toy(seconds=0.01))
        async with client_of(directory, engines=3) as client:
            await until(lambda: None not in client.statuses().values())
            other = client._connections[1]
            assert other.info is not None
            other.info = replace(other.info, fingerprint="fp_other")
            # It would be chosen last at first, and first after that.
            other.status = EngineStatus(free_kv=0)
            client._connections[0].status = EngineStatus(free_kv=1)
            generation = await client.generate(requests(1, max_tokens=60))
            reading = asyncio.ensure_future(tokens_of(generation))
            flight = generation.flights[0]
            directory.restarting = False
            for i in dying:
                await until(lambda c=client._connections[i]: flight.request.id in c.flights)  # type: ignore[misc]
                held = len(flight.tokens)
                await until(lambda held=held: len(flight.tokens) > held)  # type: ignore[misc]
                other.status = EngineStatus(free_kv=1000)
                directory.engines[i].kill()
            assert len((await reading)[0]) == 60
            assert directory.engines[0].actor._steps.status().steps > 0
            assert (directory.engines[1].actor._steps.status().steps > 0) == (len(dying) == 2)
            fingerprint = "fp_other+fp_toy" if len(dying) == 2 else "fp_toy"
            assert generation.fingerprint == fingerprint
            assert ("r0 goes on where bits may differ, on engine-1" in said) == (len(dying) == 2)
            directory.restarting = True

    run(scenario())


def test_one_stream_follows_another_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_actor.actor.FRAMES_PER_STREAM", 3)

    async def scenario() -> None:
        directory = LocalDirectory(build_toy(seconds=0.002))
        async with client_of(directory) as client:
            generation = await client.generate(requests(3))
            together = await tokens_of(generation)
            assert [flight.resumes for flight in generation.flights] == [0, 0, 0]
            alone = [(await tokens_of(await client.generate([each])))[0] for each in requests(3)]
            assert together == alone

    run(scenario())


@pytest.mark.parametrize("trouble", [DirectoryLostError, KeyError])
def test_no_trouble_ends_the_search_for_an_engine(
    trouble: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "RETRY_SECONDS", 0.01)

    class Troubled(LocalDirectory):
        calls = 0

        async def engine(self, index: int) -> tuple[str, LocalEngine, EngineInfo]:
            self.calls += 1
            if self.calls < 3:
                raise trouble("not now")
            return await super().engine(index)

    async def scenario() -> None:
        async with client_of(Troubled(build_toy())) as client:
            await tokens_of(await client.generate(requests(1)))

    run(scenario())


def test_what_keeps_engines_from_being_built_is_raised_at_the_start() -> None:
    def broken() -> Any:
        raise FileNotFoundError("no model at /nowhere")

    async def scenario() -> None:
        directory = LocalDirectory(broken)
        with pytest.raises(EngineFailedError, match="no model at /nowhere"):
            await EngineClient("replica", 1, directory, directory.max_waiting).start()
        directory.stop()

    run(scenario())
