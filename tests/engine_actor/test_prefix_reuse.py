"""What slots remember changes when a token comes, never which."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from engine_actor.engine import Engine
from engine_actor.prefixes import BLOCK
from engine_actor.request import Request
from engine_actor.scheduler import Mode, Reuse
from model.batch import Batch
from model.executor import SamplingParams
from model.model_executor import ModelExecutor
from model.storage import SlotStorage
from policies import POLICIES, load_policy
from policies.base import Schedulable
from policies.fair import Fair
from policies.fcfs import Fcfs
from tests.fakes import FakeModel, fake_storage


def engine(
    reuse: Reuse = "tenant", *, slots: int = 4, mode: Mode = "chunked", policy: str = "fcfs", **limits: int
) -> Engine:
    ticks = itertools.count()
    return Engine(
        ModelExecutor(FakeModel(), fake_storage(slots, 128)),
        load_policy(policy),
        mode=mode,
        prefix_reuse=reuse,
        clock=lambda: float(next(ticks)),
        **limits,
    )


def request(name: str, prompt: list[int], max_tokens: int = 3, **more: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return Request(name, prompt, params, **more)  # type: ignore[arg-type]


def finish(subject: Engine, *requests: Request) -> int:
    """Rows computed until all are done."""
    for item in requests:
        subject.submit(item)
    rows = 0
    while subject.has_work():
        rows += subject.step()[1].rows
        subject.slots.check()
    return rows


STEM = [token % 90 for token in range(50)]


def test_the_next_turn_computes_what_is_new() -> None:
    subject = engine()
    first = request("first", STEM)
    assert finish(subject, first) == len(STEM) + 2
    second = request("second", [*first.tokens[:-1], 5, 6, 7])
    assert finish(subject, second) == 3 + 2
    assert second.cached_tokens == len(STEM) + 2
    plain = request("second", second.prompt)
    finish(engine("off"), plain)
    assert second.output == plain.output


def test_a_prompt_that_many_share_is_computed_once_even_if_they_come_together() -> None:
    for mode in ("chunked", "batched", "separate"):
        subject = engine(mode=mode)
        together = [request(f"r{i}", [*STEM, 60 + i]) for i in range(4)]
        rows = finish(subject, *together)
        assert rows == len(STEM) + 4 + 4 * 2
        alone = [request(f"r{i}", item.prompt) for i, item in enumerate(together)]
        for item in alone:
            finish(engine("off"), item)
        assert [item.output for item in together] == [item.output for item in alone]


def test_a_preempted_request_whose_slot_is_taken_computes_again() -> None:
    subject = engine(slots=2, policy="priority")
    low = request("low", STEM, 9, priority=5)
    other = request("other", [1] * 20, 9, priority=4)
    for item in (low, other):
        subject.submit(item)
    subject.step()
    subject.step()
    urgent = request("urgent", [2] * 20, 1)
    finish(subject, urgent)
    assert low.num_preemptions == 1
    assert low.recomputed_tokens == low.forgotten > 0
    plain = request("low", STEM, 9)
    finish(engine("off"), plain)
    assert low.output == plain.output


@pytest.mark.parametrize(
    ("reuse", "tenants", "salts", "shared"),
    [
        ("tenant", "aa", ("", ""), True),
        ("tenant", "ab", ("", ""), False),
        ("all", "ab", ("", ""), True),
        ("all", "aa", ("x", "y"), False),
        ("tenant", "aa", ("x", "x"), True),
        ("off", "aa", ("", ""), False),
    ],
)
def test_who_may_reuse_whose(reuse: Reuse, tenants: str, salts: tuple[str, str], shared: bool) -> None:
    subject = engine(reuse)
    first, second = (
        request(f"r{i}", [*STEM, 9, 9], tenant=tenant, cache_salt=salt)
        for i, (tenant, salt) in enumerate(zip(tenants, salts, strict=True))
    )
    finish(subject, first)
    finish(subject, second)
    assert (second.cached_tokens > 0) is shared
    assert second.output == first.output


def test_scores_of_a_prompt_are_computed_not_skipped() -> None:
    subject = engine()
    finish(subject, request("warms", STEM))
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0)
    scored = Request("scored", STEM, params)
    assert finish(subject, scored) == len(STEM) + 1
    assert len(scored.prompt_scores) == len(STEM) - 1
    assert scored.cached_tokens == 0


def test_a_budget_forgets_the_longest_unused_and_only_when_it_is_needed() -> None:
    subject = engine(slots=3, kv_budget=120)
    finish(subject, request("old", [1] * 40, 1))
    finish(subject, request("new", [2] * 40, 1))
    assert subject.slots.warm_tokens == 80
    finish(subject, request("small", [3] * 20, 1))
    assert subject.slots.warm_tokens == 100
    subject.submit(request("large", [4] * 60, 1))
    record = subject.step()[1]
    assert record.evicted == 40
    assert record.kv_tokens + subject.slots.warm_tokens <= 120
    again = request("again", [*[2] * 40, 7], 1)
    finish(subject, again)
    assert again.cached_tokens == 40


def test_fair_charges_for_what_had_to_be_computed() -> None:
    charges: list[int] = []

    class Recording(Fair):
        def charge(self, request: Schedulable, prompt_tokens: int, output_tokens: int) -> None:
            charges.append(prompt_tokens)
            super().charge(request, prompt_tokens, output_tokens)

    subject = Engine(ModelExecutor(FakeModel(), fake_storage(2, 128)), Recording())
    finish(subject, request("first", STEM, 1))
    finish(subject, request("second", [*STEM, 1, 2], 1))
    assert [charge for charge in charges if charge] == [len(STEM), 2]


def test_whoever_misses_is_not_passed_by_whoever_hits() -> None:
    subject = engine(slots=1)
    finish(subject, request("warms", STEM, 1))
    runs = request("runs", [3] * 20, 5)
    miss, hit = request("miss", [5] * 20, 1, arrival=1.0), request("hit", [*STEM, 1], 1, arrival=2.0)
    for item in (runs, miss, hit):
        subject.submit(item)
    admitted: list[str] = []
    while subject.has_work():
        admitted += subject.step()[1].admitted
    assert admitted == ["runs", "miss", "hit"]


def test_what_failed_is_computed_anew() -> None:
    class Chokes(FakeModel):
        failing = True

        def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
            logits = super().forward(batch, storage)
            return logits * float("nan") if self.failing else logits

    model = Chokes()
    subject = Engine(ModelExecutor(model, fake_storage(2, 128)), Fcfs())
    finish(subject, failed := request("failed", STEM))
    assert failed.finish_reason == "error"
    model.failing = False
    finish(subject, again := request("again", STEM))
    assert again.cached_tokens == 0


@pytest.mark.parametrize("mode", ["chunked", "batched", "separate"])
@pytest.mark.parametrize("seed", range(6))
def test_random_chats_say_what_they_say_without_reuse(mode: Mode, seed: int) -> None:
    """Turns, shared stems, aborts, evictions, preemptions, copies; what is freed is NaN."""
    rng = random.Random(seed)
    stems = [[rng.randrange(90) for _ in range(rng.randint(BLOCK, 60))] for _ in range(3)]
    policy = rng.choice(list(POLICIES))
    subject = engine(
        rng.choice(["tenant", "all"]),
        slots=rng.randint(2, 4),
        mode=mode,
        policy=policy,
        kv_budget=rng.choice([130, 200, 512]),
        max_step_tokens=rng.randint(8, 80),
    )
    done: list[Request] = []
    waiting = [
        rng.choice(stems)[: rng.randint(10, 60)] + [rng.randrange(90) for _ in range(rng.randint(0, 9))]
        for _ in range(24)
    ]
    hits = copies = 0
    live: list[Request] = []
    while waiting or subject.has_work():
        if waiting and rng.random() < 0.5:
            prompt = waiting.pop()
            if done and rng.random() < 0.4:
                prompt = [*rng.choice(done).tokens, *prompt[:5]][:100]
            made = request(
                f"r{len(done) + len(live)}-{len(waiting)}",
                prompt,
                rng.randint(1, 12),
                tenant=rng.choice("ab"),
                priority=rng.randrange(3),
                arrival=float(len(waiting)),
            )
            live.append(made)
            subject.submit(made)
        if live and rng.random() < 0.05:
            subject.abort(rng.choice(live).id)
        _, record = subject.step()
        subject.slots.check()
        assert record.errors == 0
        assert record.kv_tokens + subject.slots.warm_tokens <= subject.scheduler.kv_budget
        hits += sum(record.reused.values())
        copies += record.copied
        done += [item for item in live if item.finish_reason]
        live = [item for item in live if not item.finish_reason]
    assert hits > 0
    for item in done:
        plain = request("plain", item.prompt, item.params.max_tokens)
        finish(engine("off"), plain)
        assert item.output == plain.output[: item.num_output]
        assert item.finish_reason == "abort" or item.num_output == item.params.max_tokens
