"""The scheduler under random load: nothing is lost, nothing overflows, nobody starves."""

from __future__ import annotations

import functools
import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.engine import Engine
from engine_actor.request import Phase, PreemptReason, Request
from engine_actor.scheduler import Mode, Plan
from model.executor import SamplingParams
from model.model_executor import ModelExecutor
from model.timed_executor import TimedExecutor
from policies import POLICIES, load_policy
from policies.base import Policy, Schedulable
from policies.fair import Fair
from policies.fcfs import Fcfs
from policies.priority import Priority
from policies.static import Static
from tests.fakes import FakeModel, fake_storage

MAX_LEN = 16


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    tenant: str = "a"
    priority: int = 0
    aborted_after: int | None = None
    """Steps from its arrival to its abort."""

    def request(self, name: str) -> Request:
        return Request(
            name,
            list(self.prompt),
            SamplingParams(max_tokens=self.max_tokens, temperature=0),
            tenant=self.tenant,
            priority=self.priority,
            arrival=float(self.step),
        )


@dataclass(frozen=True)
class Load:
    arrivals: list[Arrival]
    slots: int
    budget: int
    mode: Mode
    chunk: int | None
    """Rows that a chunked step has beyond one per slot; None: the scheduler's own."""

    def engine(self, policy: Policy, ticks: Iterator[int], model: FakeModel | None = None) -> Engine:
        storage = fake_storage(self.slots, MAX_LEN)
        return Engine(
            ModelExecutor(model, storage) if model else TimedExecutor(self.slots, MAX_LEN),
            policy,
            mode=self.mode,
            max_step_tokens=None if self.chunk is None else self.slots + self.chunk,
            kv_budget=self.budget,
            clock=lambda: float(next(ticks)),
        )


@st.composite
def loads(draw: st.DrawFn, *, aborts: bool = True, tenants: str = "abc", most: int = 14) -> Load:
    slots = draw(st.integers(1, 4))
    budget = draw(st.integers(4, slots * MAX_LEN))
    longest = min(budget, MAX_LEN)
    arrivals = []
    for _ in range(draw(st.integers(1, most))):
        prompt = draw(st.integers(1, longest - 1))
        arrivals.append(
            Arrival(
                step=draw(st.integers(0, 20)),
                prompt=tuple(draw(st.lists(st.integers(0, 9), min_size=prompt, max_size=prompt))),
                max_tokens=draw(st.integers(1, longest - prompt)),
                tenant=draw(st.sampled_from(tenants)),
                priority=draw(st.integers(0, 3)),
                aborted_after=draw(st.none() | st.integers(0, 12)) if aborts else None,
            )
        )
    mode: Mode = draw(st.sampled_from(["separate", "batched", "chunked"]))
    return Load(arrivals, slots, budget, mode, chunk=draw(st.none() | st.integers(1, 20)))


@functools.cache
def alone(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    engine = Engine(ModelExecutor(FakeModel(), fake_storage(1, MAX_LEN)), Fcfs())
    request = Arrival(0, prompt, max_tokens).request("alone")
    engine.submit(request)
    while engine.has_work():
        engine.step()
    return request.output


def policies() -> list[Policy]:
    return [*(load_policy(name) for name in POLICIES), Priority(aging_seconds=4), Fair(1, 1, {"a": 3.0})]


@dataclass
class Watched:
    """An engine under load that checks every plan, and every ending."""

    engine: Engine
    requests: dict[str, Request] = field(default_factory=dict)
    endings: Counter[str] = field(default_factory=Counter)
    preempted: Counter[str] = field(default_factory=Counter)
    newcomers: set[str] = field(default_factory=set)
    """Admitted in the step before."""

    def __post_init__(self) -> None:
        original = self.engine.scheduler.plan

        def checked(now: float) -> Plan:
            plan = original(now)
            self.check(plan, now)
            return plan

        self.engine.scheduler.plan = checked  # type: ignore[method-assign]

    def run(self, load: Load) -> None:
        for step in itertools.count():
            for index, arrival in enumerate(load.arrivals):
                name = f"r{index}"
                if arrival.step == step:
                    self.requests[name] = arrival.request(name)
                    self.engine.submit(self.requests[name])
                if arrival.aborted_after is not None and arrival.step + arrival.aborted_after == step:
                    self.endings[name] += self.engine.abort(name)
            if not self.engine.has_work() and len(self.requests) == len(load.arrivals):
                break
            outputs, record = self.engine.step()
            self.endings.update(o.request_id for o in outputs if o.finish_reason)
            self.preempted.update(list(record.preempted))
            assert record.kv_tokens <= self.engine.scheduler.kv_budget
            assert record.errors == 0
            assert step < 3000, "deadlock"
        assert self.endings == Counter(dict.fromkeys(self.requests, 1))
        assert self.engine.slots.free == self.engine.slots.count
        assert self.engine.slots.tokens == 0
        assert self.engine.waiting == 0
        assert {name: r.num_preemptions for name, r in self.requests.items() if r.num_preemptions} == {
            name: count for name, count in self.preempted.items() if count
        }

    def check(self, plan: Plan, now: float) -> None:
        scheduler, slots = self.engine.scheduler, self.engine.slots
        running = scheduler.running
        slots.check()
        assert {r.id: r.slot for r in [*running, *scheduler.lingering]} == {
            owner: slot for slot in range(slots.count) if (owner := slots.owner(slot))
        }
        assert all(list(slots.held(r.slot)) == r.tokens[: r.computed] for r in running)
        assert len(running) + self.engine.waiting == len(self.engine.requests)

        works = [w for w in [*itertools.chain(*plan.prefills), *plan.batch] if not w.idle]
        rows = Counter({work.sequence: work.count for work in works})
        assert len(rows) == len(works)
        cached = sum(r.computed + rows[r] for r in running)
        assert cached <= scheduler.kv_budget
        assert bool(works) == bool(running), "somebody runs, but nothing is computed"
        assert all(rows[r] == 1 for r in running if r.phase is Phase.DECODE)
        if scheduler.mode == "chunked":
            wanted = sum(len(r.tokens) - r.computed for r in running)
            assert sum(rows.values()) == min(wanted, scheduler.step_tokens)
        else:
            assert all(rows[r] == len(r.tokens) - r.computed for r in running)

        evicted = {r.id for r, reason in plan.preempted.items() if reason == "kv"}
        assert not evicted & self.newcomers, "admitted without room for its own first step"
        self.newcomers = {r.id for r in plan.admitted}

        head = scheduler.policy.peek(now)
        if head is not None and isinstance(scheduler.policy, Static):
            assert running
        elif head is not None:
            assert isinstance(head, Request)
            room = max(1, scheduler._least_step_tokens - len(running))
            steps = -(-len(head.tokens) // room) if scheduler.mode == "chunked" else 1
            grown = sum(len(r.tokens) for r in [head, *running]) + steps * (len(running) + 1)
            full = bool(running) and grown > scheduler.kv_budget
            assert not slots.free or full, "idle slot, admissible request"


@given(load=loads(), pick=st.integers(0, len(policies()) - 1))
@settings(max_examples=300, deadline=None)
def test_any_load_ends_exactly_once_within_budget_and_work_conserving(load: Load, pick: int) -> None:
    Watched(load.engine(policies()[pick], itertools.count())).run(load)


@given(load=loads(most=8), pick=st.integers(0, len(policies()) - 1))
@settings(max_examples=100, deadline=None)
def test_whatever_is_preempted_says_what_it_says_alone(load: Load, pick: int) -> None:
    watched = Watched(load.engine(policies()[pick], itertools.count(), FakeModel()))
    watched.run(load)
    for index, arrival in enumerate(load.arrivals):
        expected = alone(arrival.prompt, arrival.max_tokens)
        output = watched.requests[f"r{index}"].output
        assert output == expected[: len(output)]
        assert len(output) == len(expected) or arrival.aborted_after is not None


class Ledger(Fair):
    """Fair, keeping the books of the paper's theorem: service since both of two tenants wait."""

    def __init__(self, *weights: float) -> None:
        super().__init__(1.0, weights[0], dict(zip("abc", weights[1:], strict=True)))
        self.service = dict.fromkeys("abc", 0.0)
        self.backlog = Counter[str]()
        self.since: dict[str, int] = {}
        """When each waiting tenant began to wait, as a count of such beginnings."""
        self.extremes: dict[tuple[tuple[str, int], tuple[str, int]], tuple[float, float]] = {}
        self.gap = 0.0
        self._beginnings = itertools.count()

    def enqueue(self, request: Schedulable, now: float) -> None:
        if not self.backlog[request.tenant]:
            self.since[request.tenant] = next(self._beginnings)
        self.backlog[request.tenant] += 1
        super().enqueue(request, now)
        self._note()

    def admit(self, request: Schedulable, now: float) -> None:
        self._leave(request.tenant)
        super().admit(request, now)

    def withdraw(self, request: Schedulable) -> None:
        self._leave(request.tenant)
        super().withdraw(request)

    def charge(self, request: Schedulable, prompt_tokens: int, output_tokens: int) -> None:
        super().charge(request, prompt_tokens, output_tokens)
        cost = self._prompt_weight * prompt_tokens + self._output_weight * output_tokens
        self.service[request.tenant] += cost / self._weights[request.tenant]
        self._note()

    def _leave(self, tenant: str) -> None:
        self.backlog[tenant] -= 1
        if not self.backlog[tenant]:
            del self.since[tenant]

    def _note(self) -> None:
        for one, other in itertools.combinations(sorted(self.since.items()), 2):
            difference = self.service[one[0]] - self.service[other[0]]
            low, high = self.extremes.get((one, other), (difference, difference))
            low, high = min(low, difference), max(high, difference)
            self.extremes[one, other] = low, high
            self.gap = max(self.gap, high - low)


@st.composite
def floods(draw: st.DrawFn) -> Load:
    """Tenants that stay backlogged in a pool so small that they keep pushing each other out."""
    rng = draw(st.randoms(use_true_random=False))
    slots = rng.choice([2, 4, 8])
    budget = rng.randint(6, 16) if slots < 8 else rng.randint(16, 60)
    longest = min(budget, MAX_LEN)
    tenants = rng.choice(["ab", "abc"])
    arrivals = []
    for _ in range(rng.randint(20, 80)):
        prompt = rng.choice([1, 1, 2, rng.randint(1, longest - 1)])
        left = longest - prompt
        step = rng.randint(0, 10) if rng.random() < 0.7 else rng.randint(0, 100)
        arrivals.append(
            Arrival(step, (1,) * prompt, rng.choice([left, rng.randint(1, left)]), rng.choice(tenants))
        )
    return Load(arrivals, slots, budget, rng.choice(["separate", "batched", "chunked"]), rng.randint(1, 20))


@given(
    load=floods(),
    weights=st.tuples(st.sampled_from([1.0, 2.0, 5.0]), *[st.sampled_from([1.0, 1.0, 0.5, 3.0])] * 3),
)
@settings(max_examples=100, deadline=None)
def test_backlogged_tenants_stay_within_the_bound_of_the_paper(
    load: Load, weights: tuple[float, ...]
) -> None:
    policy = Ledger(*weights)
    Watched(load.engine(policy, itertools.count())).run(load)
    longest = max(len(arrival.prompt) for arrival in load.arrivals)
    bound = 2 * max(longest, weights[0] * load.budget) / min(weights[1:])
    assert policy.gap <= bound * (1 + 1e-9)


names = itertools.count()


def submitted(engine: Engine, *arrivals: Arrival) -> list[Request]:
    requests = [arrival.request(f"s{next(names)}") for arrival in arrivals]
    for request in requests:
        engine.submit(request)
    return requests


def small(policy: Policy, *, slots: int = 2, budget: int | None = None, mode: Mode = "chunked") -> Engine:
    ticks = itertools.count()
    return Engine(
        TimedExecutor(slots, MAX_LEN),
        policy,
        mode=mode,
        max_step_tokens=40,
        kv_budget=budget,
        clock=lambda: float(next(ticks)),
    )


def test_the_strictly_more_urgent_takes_a_slot_and_its_equal_waits() -> None:
    engine = small(Priority())
    low, lower = submitted(engine, Arrival(0, (1,), 9, priority=5), Arrival(0, (1,), 9, priority=6))
    engine.step()
    urgent, equal = submitted(engine, Arrival(1, (1,), 5, priority=0), Arrival(1, (1,), 5, priority=5))
    _, record = engine.step()
    assert record.preempted == {lower.id: "displaced"}
    assert urgent.phase is Phase.DECODE
    assert equal.phase is Phase.WAITING
    while engine.has_work():
        engine.step()
    assert (low.num_preemptions, lower.num_preemptions, equal.num_preemptions) == (0, 1, 0)
    assert lower.recomputed_tokens == 1


def test_no_more_are_displaced_than_make_room() -> None:
    engine = small(Priority(), slots=4, budget=20)
    running = submitted(engine, *[Arrival(0, (1,) * 4, 3, priority=p) for p in (3, 1, 2)])
    engine.step()
    assert len(engine.scheduler.running) == 3
    submitted(engine, Arrival(1, (1,) * 7, 1))
    _, record = engine.step()
    assert record.preempted == {running[0].id: "displaced"}


def test_nobody_is_displaced_in_vain() -> None:
    engine = small(Priority(), slots=3, budget=16)
    submitted(engine, Arrival(0, (1,) * 8, 4, priority=0), Arrival(0, (1,) * 2, 4, priority=9))
    engine.step()
    (big,) = submitted(engine, Arrival(1, (1,) * 9, 1, priority=1))
    _, record = engine.step()
    assert record.preempted == {}
    assert big.phase is Phase.WAITING


def test_a_tenant_too_far_ahead_yields_even_where_that_is_not_enough_room() -> None:
    policy = Fair()
    engine = small(policy, slots=3, budget=16)
    ahead, first, _ = submitted(
        engine,
        Arrival(0, (1,) * 2, 9, "ahead"),
        Arrival(0, (1,) * 4, 9, "behind"),
        Arrival(0, (1,) * 12, 1, "behind"),
    )
    _, record = engine.step()
    assert record.admitted == [ahead.id, first.id]
    policy.charge(ahead, 0, 16)
    _, record = engine.step()
    assert record.preempted == {ahead.id: "displaced"}
    assert engine.scheduler.running == [first]


def test_equal_priorities_never_displace_each_other() -> None:
    engine = small(Priority(aging_seconds=1), slots=1)
    requests = submitted(engine, *[Arrival(0, (1,), 15) for _ in range(4)])
    while engine.has_work():
        engine.step()
    assert sum(r.num_preemptions for r in requests) == 0


@pytest.mark.parametrize(("aging", "bound"), [(4.0, 3 * 4.0), (None, None)])
def test_aging_bounds_the_wait_behind_an_endless_urgent_stream(
    aging: float | None, bound: float | None
) -> None:
    """Three levels below a stream that fills the only slot: admitted after 3 * aging_seconds, and displaced
    once at most, before it has aged so far. Without aging it starves."""
    engine = small(Priority(aging_seconds=aging), slots=1)
    now = 0.0
    engine.clock = lambda: now
    (low,) = submitted(engine, Arrival(0, (1,), 5, priority=3))
    for step in range(60):
        now = float(step)
        submitted(engine, Arrival(step, (1,), 2, priority=0))
        engine.step()
    if bound is None:
        assert low.phase is Phase.WAITING
    else:
        # Each step brings a request of two steps, so those that arrived within the bound, and
        # rank ahead, take twice as long to serve.
        assert low.finished is not None
        assert bound < low.finished <= 2 * (bound + 1) + low.params.max_tokens
        assert low.num_preemptions <= 1


def test_kv_shortage_spares_the_most_urgent() -> None:
    engine = small(Priority(), slots=3, budget=16)
    requests = submitted(engine, *[Arrival(0, (1,) * 3, 9, priority=p) for p in (2, 0, 1)])
    least, most, middle = requests
    order: list[tuple[str, PreemptReason]] = []
    while engine.has_work():
        _, record = engine.step()
        order += record.preempted.items()
    assert order[:2] == [(least.id, "kv"), (middle.id, "kv")]
    assert most.num_preemptions == 0


def test_a_static_batch_prefills_together_pads_the_finished_and_refills_when_the_last_is_done() -> None:
    engine = small(Static(), mode="batched")
    first = submitted(engine, Arrival(0, (1, 2), 1), Arrival(0, (3,), 3))
    waiting = submitted(engine, Arrival(0, (1,), 1), Arrival(0, (1,), 1), Arrival(0, (1,), 1))
    records = []
    while engine.has_work():
        records.append(engine.step()[1])
    assert [r.admitted for r in records] == [
        [r.id for r in first],
        [],
        [],
        [w.id for w in waiting[:2]],
        [waiting[2].id],
    ]
    assert [r.rows for r in records] == [3, 1, 1, 2, 1]
    assert [r.padded_rows for r in records] == [3, 2, 2, 2, 1]
    assert [r.free_slots for r in records] == [0, 0, 2, 2, 2]


def test_a_prompt_is_charged_once_and_each_output_token_once() -> None:
    charges = Counter[str]()

    class Recording(Fcfs):
        def charge(self, request: Schedulable, prompt_tokens: int, output_tokens: int) -> None:
            charges[f"{request.id} prompt"] += prompt_tokens
            charges[f"{request.id} output"] += output_tokens

    engine = small(Recording(), slots=3, budget=16)
    requests = submitted(engine, *[Arrival(0, (1,) * 3, 9) for _ in range(3)])
    replayed = Request("replayed", [1] * 3, SamplingParams(max_tokens=4), resumed=[1, 1], arrival=9.0)
    engine.submit(replayed)
    while engine.has_work():
        engine.step()
    assert sum(r.recomputed_tokens for r in requests) > 0
    for request in requests:
        assert charges[f"{request.id} prompt"] == 3
        assert charges[f"{request.id} output"] == 9
    assert charges["replayed prompt"] == 0
    assert charges["replayed output"] == 2


def test_preemptions_are_logged_once_a_second_at_most(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="engine_actor.engine")
    ticks = itertools.count()
    engine = small(Fcfs(), slots=4, budget=16)
    engine.clock = lambda: next(ticks) / 40
    requests = submitted(engine, *[Arrival(0, (1,) * 2, 12) for _ in range(12)])
    steps = 0
    while engine.has_work():
        engine.step()
        steps += 1
    lines = [line for line in caplog.messages if "preempted" in line]
    assert 2 <= len(lines) <= next(ticks) / 40 + 2
    total = sum(r.num_preemptions for r in requests)
    assert sum(int(line.split()[1]) for line in lines) == total > len(lines)
    assert f"({lines[0].split()[1]} kv)" in lines[0]


def test_the_default_step_is_short_while_it_would_hold_up_decodes_and_nobody_queues() -> None:
    engine = Engine(ModelExecutor(FakeModel(), fake_storage(num_slots=4, max_len=256)), Fcfs())
    for number in range(4):
        engine.submit(
            Request(f"r{number}", [number] * 100, SamplingParams(max_tokens=50), arrival=float(number))
        )
    rows = [engine.step()[1].rows for _ in range(3)]
    engine.submit(Request("waits", [1], SamplingParams(max_tokens=1), arrival=9.0))
    rows += [engine.step()[1].rows for _ in range(3)]
    assert rows == [64, 64, 8, 64, 64, 64]
