"""Each policy by itself: who is next, who yields, what it costs, how it is loaded."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from engine_actor.request import Request
from model.executor import SamplingParams
from policies import POLICIES, PolicyError, load_policy
from policies.base import Policy
from policies.fair import REMEMBERED_IDLE_TENANTS, Fair
from policies.priority import Priority
from policies.ranked import WaitingQueue

submission = itertools.count()


def request(name: str, arrival: float = 0.0, *, tenant: str = "a", priority: int = 0) -> Request:
    made = Request(name, [1], SamplingParams(), tenant=tenant, priority=priority, arrival=arrival)
    made.sequence = next(submission)
    return made


def drain(policy: Policy, served: Callable[[Request], None] = lambda _: None) -> list[str]:
    names = []
    while (head := policy.peek(0.0)) is not None:
        assert isinstance(head, Request)
        policy.admit(head, 0.0)
        served(head)
        policy.finish(head)
        names.append(head.id)
    assert policy.waiting == 0
    return names


@pytest.mark.parametrize("name", ["fcfs", "static"])
def test_arrival_order_which_a_preempted_request_keeps(name: str) -> None:
    policy = load_policy(name)
    first, second, third = (request(f"r{i}", float(i)) for i in range(3))
    for item in (second, first, third):
        policy.enqueue(item, 0.0)
    policy.admit(first, 0.0)
    policy.enqueue(first, 9.0)
    assert drain(policy) == ["r0", "r1", "r2"]


def test_equal_arrivals_go_by_submission_even_after_preemption() -> None:
    policy = load_policy("fcfs")
    items = [request(name) for name in "zyx"]
    for item in items:
        policy.enqueue(item, 0.0)
    policy.admit(items[0], 0.0)
    policy.enqueue(items[0], 1.0)
    assert drain(policy) == ["z", "y", "x"]


def test_fcfs_ranks_by_admission_and_displaces_nobody() -> None:
    policy = load_policy("fcfs")
    running = [request("old"), request("new")]
    assert policy.order(running, 0.0) == running
    assert not policy.displaced(request("urgent", priority=-9), running, 0.0)


def test_priority_lower_is_more_urgent_and_arrival_breaks_ties() -> None:
    policy = Priority()
    for item in (request("late", 2, priority=1), request("early", 1, priority=1), request("urgent", 3)):
        policy.enqueue(item, 0.0)
    assert drain(policy) == ["urgent", "early", "late"]


def test_priority_displaces_the_strictly_less_urgent_only_the_least_first() -> None:
    policy = Priority()
    running = [request(name, i, priority=p) for i, (name, p) in enumerate([("a", 1), ("b", 3), ("c", 2)])]

    def names(waiting: Request) -> list[str]:
        return [r.id for r in policy.displaced(waiting, running, 0.0)]

    assert names(request("w", -5.0, priority=3)) == []
    assert names(request("w", 9.0, priority=2)) == ["b"]
    assert names(request("w", 9.0, priority=0)) == ["b", "c", "a"]
    assert [r.id for r in policy.order(running, 0.0)] == ["a", "c", "b"]


def test_a_wait_of_aging_seconds_gains_one_level() -> None:
    policy = Priority(aging_seconds=10)
    old = request("old", 0.0, priority=3)
    just_before, just_after = request("before", 29.9), request("after", 30.1)
    for item in (just_after, old, just_before):
        policy.enqueue(item, 0.0)
    assert drain(policy) == ["before", "old", "after"]
    assert policy.displaced(just_before, [old], 0.0) == [old]
    assert not policy.displaced(just_after, [old], 0.0)
    assert not policy.displaced(old, [just_after], 1e9)


def test_fair_serves_the_tenant_served_least_by_weighted_tokens() -> None:
    policy = Fair(prompt_weight=1, output_weight=2, tenant_weights={"big": 2.0})
    for i in range(6):
        policy.enqueue(request(f"big{i}", float(i), tenant="big"), 0.0)
    for i in range(3):
        policy.enqueue(request(f"small{i}", 10.0 + i, tenant="small"), 0.0)
    order = drain(policy, lambda served: policy.charge(served, 10, 5))
    # 20 each, which counts 10 for the tenant of weight 2: two of its requests to one of the other's.
    assert order == ["big0", "small0", "big1", "big2", "small1", "big3", "big4", "small2", "big5"]


def test_fair_an_idle_tenant_comes_back_without_credit_or_debt() -> None:
    policy = Fair()
    hog, idle = request("hog0", tenant="hog"), request("idle0", tenant="idle")
    policy.enqueue(hog, 0.0)
    policy.admit(hog, 0.0)
    policy.charge(hog, 1000, 0)
    # Nobody waits: the newcomer is lifted to the tenant served last.
    policy.enqueue(idle, 0.0)
    policy.enqueue(request("hog1", 1.0, tenant="hog"), 0.0)
    policy.admit(idle, 0.0)
    policy.charge(idle, 10, 0)
    policy.finish(idle)
    # Somebody waits: it is lifted to the least of those, and its own 10 stay.
    policy.enqueue(request("idle1", 0.5, tenant="idle"), 0.0)
    assert drain(policy) == ["hog1", "idle1"]


def test_fair_spares_the_oldest_and_lets_the_most_served_tenants_newest_yield_first() -> None:
    policy = Fair()
    running = [request(name, tenant=name[0]) for name in ("a0", "b0", "a1", "c0", "a2")]
    for item in running:
        policy.enqueue(item, 0.0)
        policy.admit(item, 0.0)
    for item, tokens in zip(running, (50, 10, 0, 30, 0), strict=True):
        policy.charge(item, tokens, 0)
    assert [r.id for r in policy.order(running, 0.0)] == ["a0", "b0", "c0", "a1", "a2"]


def test_fair_a_tenant_ahead_by_all_that_the_kv_can_hold_yields() -> None:
    policy = Fair(output_weight=2)
    policy.capacity(100)
    ahead, other, behind = (request(name, tenant=name) for name in ("ahead", "other", "behind"))
    for item in (ahead, other):
        policy.enqueue(item, 0.0)
        policy.admit(item, 0.0)
    policy.enqueue(behind, 0.0)
    policy.charge(ahead, 0, 98)
    assert not policy.displaced(behind, [ahead, other], 0.0)
    policy.charge(ahead, 1, 0)
    assert policy.displaced(behind, [ahead, other], 0.0) == [ahead]


def test_fair_remembers_a_bounded_number_of_idle_tenants_and_forgets_the_least_served() -> None:
    policy = Fair()
    keep = request("keep", tenant="keep")
    policy.enqueue(keep, 0.0)
    policy.enqueue(request("waits", tenant="waits"), 0.0)
    policy.admit(keep, 0.0)
    policy.charge(keep, 10**9, 0)
    policy.finish(keep)
    for i in range(REMEMBERED_IDLE_TENANTS + 500):
        item = request("one", tenant=f"t{i}")
        policy.enqueue(item, 0.0)
        policy.withdraw(item)
    assert len(policy._accounts) == REMEMBERED_IDLE_TENANTS + 1
    assert "keep" in policy._accounts
    assert len(policy._heap) <= 2 * policy.waiting + 17


@pytest.mark.parametrize("name", POLICIES)
def test_any_order_of_withdrawals_leaves_the_rest_in_order(name: str) -> None:
    rng = random.Random(name)
    policy, twin = load_policy(name), load_policy(name)
    items = [
        request(f"r{i}", rng.random(), tenant=rng.choice("abc"), priority=rng.randrange(3))
        for i in range(300)
    ]
    gone = rng.sample(items, 200)
    for item in items:
        policy.enqueue(item, 0.0)
    for item in gone:
        policy.withdraw(item)
    for item in items:
        if item not in gone:
            twin.enqueue(item, 0.0)
    assert policy.waiting == 100
    charge = {id(p): lambda served, p=p: p.charge(served, 7, 3) for p in (policy, twin)}
    assert drain(policy, charge[id(policy)]) == drain(twin, charge[id(twin)])


def test_an_id_that_comes_back_after_an_abort_waits_at_its_new_place() -> None:
    policy = load_policy("fcfs")
    gone, other, again = request("same", 0.0), request("other", 1.0), request("same", 2.0)
    first = request("first", -1.0)
    for item in (first, gone, other):
        policy.enqueue(item, 0.0)
    policy.withdraw(gone)
    policy.enqueue(again, 0.0)
    assert drain(policy) == ["first", "other", "same"]
    assert policy.peek(0.0) is None


def test_what_was_withdrawn_does_not_pile_up() -> None:
    queue = WaitingQueue()
    queue.push((0.0,), request("head"))
    for i in range(5000):
        item = request(f"r{i}", 1.0)
        queue.push((1.0,), item)
        queue.remove(item)
        assert len(queue._heap) <= 2 * len(queue) + 17


def test_load_by_name_with_settings() -> None:
    assert {name: type(load_policy(name)) for name in POLICIES} == POLICIES
    assert isinstance(load_policy("priority", aging_seconds=5), Priority)
    assert isinstance(load_policy("policies.fair:Fair", output_weight=3), Fair)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fifo", {}, "unknown policy 'fifo'.*fcfs, priority, fair, static.*package.module:Class"),
        ("no.such.module:Policy", {}, "'no.such.module:Policy' cannot be imported.*No module named"),
        ("policies.fair:Fare", {}, "'policies.fair:Fare' cannot be imported.*Fare"),
        (":Fair", {}, "':Fair' cannot be imported"),
        ("collections:Counter", {}, "not a subclass of policies.base.Policy"),
        ("policies.base:Policy", {}, "policies.base:Policy.*abstract"),
        ("fcfs", {"aging_seconds": 3}, "'fcfs' has no setting 'aging_seconds'; it has no settings"),
        ("priority", {"ageing": 3}, "'priority' has no setting 'ageing'; its settings are: aging_seconds"),
        ("priority", {"aging_seconds": 0}, "'priority' refuses.*aging_seconds must be above 0, got 0"),
        ("priority", {"aging_seconds": "soon"}, "'priority' refuses its settings.*soon"),
        ("fair", {"output_weight": 0}, "'fair' refuses.*output_weight above 0"),
        ("fair", {"tenant_weights": {"a": -1.0}}, "tenant_weights must be above 0, got -1.0 for tenant 'a'"),
    ],
)
def test_what_cannot_be_loaded_says_why(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        load_policy(name, **settings)
