"""Slots: who owns them, what they hold, and what the next one finds there."""

from __future__ import annotations

import pytest

from engine_actor.prefixes import BLOCK, PrefixIndex, block_keys
from engine_actor.slots import Prefix, Slots
from model.executor import Move

LONG = list(range(100, 100 + 3 * BLOCK + 5))


def filled(count: int, *contents: list[int]) -> Slots:
    """Slots that were used and left, one after the other."""
    slots = Slots(count, 128)
    for index, tokens in enumerate(contents):
        at = slots.allocate(f"r{index}")
        slots.extend(at, tokens)
        slots.release(at)
    slots.moves.clear()
    slots.check()
    return slots


def find(slots: Slots, tokens: list[int], namespace: object = None, most: int | None = None) -> Prefix | None:
    return slots.find(namespace, tokens, [], len(tokens) - 1 if most is None else most)


def test_slots_run_out_and_come_back() -> None:
    slots = Slots(2, 8)
    first, second = slots.allocate("a"), slots.allocate("b")
    assert {first, second} == {0, 1}
    assert (slots.owner(first), slots.free) == ("a", 0)
    with pytest.raises(IndexError):
        slots.allocate("c")
    slots.release(first)
    assert slots.owner(first) is None
    assert slots.allocate("c") == first


def test_without_reuse_a_released_slot_holds_nothing() -> None:
    slots = Slots(1, 64, reuse=False)
    slot = slots.allocate("a")
    slots.extend(slot, LONG[:40])
    slots.extend(slot, [8])
    assert list(slots.held(slot)) == [*LONG[:40], 8]
    assert slots.tokens == 41
    slots.release(slot)
    slots.check()
    assert (slots.tokens, slots.warm_tokens, list(slots.held(slot))) == (0, 0, [])
    assert slots.moves == [Move(slot, 0)]
    assert find(slots, LONG) is None


def test_clear_keeps_the_owner_and_the_contents() -> None:
    slots = Slots(1, 64)
    slot = slots.allocate("a")
    slots.extend(slot, LONG[:20])
    slots.clear(slot)
    assert (slots.tokens, slots.free, slots.owner(slot), slots.moves) == (0, 0, "a", [])
    slots.release(slot)
    slots.check()


@pytest.mark.parametrize("slot", [0, -1, 2])
def test_only_held_slots_are_released(slot: int) -> None:
    with pytest.raises(ValueError, match=f"slot {slot} is not held"):
        Slots(2, 8).release(slot)


@pytest.mark.parametrize(("count", "max_len"), [(0, 8), (1, 0)])
def test_sizes_start_at_one(count: int, max_len: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Slots(count, max_len)


def test_check_finds_books_that_do_not_agree() -> None:
    slots = Slots(2, 2)
    slots.check()
    slots.allocate("a")
    slots.check()
    slots.extend(1, [1, 2, 3])
    with pytest.raises(AssertionError, match=r"miscounted|more than it can"):
        slots.check()
    twice = Slots(2, 2)
    twice.allocate("a")
    twice.allocate("a")
    with pytest.raises(AssertionError, match="two slots"):
        twice.check()


def test_the_next_turn_of_a_chat_goes_on_in_its_own_slot() -> None:
    slots = filled(2, LONG)
    assert slots.warm_tokens == len(LONG)
    prefix = find(slots, [*LONG, 1, 2, 3])
    assert prefix is not None
    assert prefix.length == len(LONG)
    assert slots.allocate("next", None, prefix) == prefix.source
    assert (list(slots.held(prefix.source)), slots.tokens, slots.warm_tokens) == (LONG, len(LONG), 0)
    assert slots.moves == []
    slots.check()


def test_at_least_the_last_token_is_computed() -> None:
    slots = filled(1, LONG)
    prefix = find(slots, LONG)
    assert prefix is not None
    assert prefix.length == len(LONG) - 1
    slots.allocate("again", None, prefix)
    assert slots.moves == [Move(0, len(LONG) - 1)]
    slots.check()


def test_a_beginning_that_others_need_is_copied_out_of_warm_and_running_slots() -> None:
    slots = filled(3, LONG)
    warm = slots.warm[0]
    other = [*LONG[: 2 * BLOCK + 3], 7, 7]
    prefix = find(slots, other)
    assert prefix == Prefix(warm, 2 * BLOCK + 3)
    first = slots.allocate("first", None, prefix)
    assert first != warm
    slots.extend(first, other[prefix.length :])
    assert slots.moves == [Move(first, prefix.length, warm)]
    running = find(slots, [*other, 9])
    assert running is not None
    assert running == Prefix(first, len(other))
    second = slots.allocate("second", None, running)
    assert slots.moves[1:] == [Move(second, len(other), first)]
    assert slots.warm == [warm]
    slots.check()


def test_the_least_recently_used_is_forgotten_first_and_a_copy_is_a_use() -> None:
    one, two, three = ([base] * BLOCK for base in (1, 2, 3))
    slots = filled(3, one, two, three)
    prefix = find(slots, [*one, 1])
    assert prefix is not None
    slots.evict(2 * BLOCK)
    slots.check()
    assert find(slots, [*one, 1]) is None, "the oldest"
    assert (slots.evicted, slots.warm_tokens) == (BLOCK, 2 * BLOCK)
    long = [*two, *range(50, 50 + 2 * BLOCK)]
    slots = filled(3, one, long, three)
    oldest = slots.warm[0]
    prefix = find(slots, [*two, 9, 9, 9])
    assert prefix is not None
    assert slots.allocate("reader", None, prefix) == oldest
    assert slots.warm[-1] == prefix.source, "read just now"
    slots.check()


def test_a_slot_that_is_needed_anyway_keeps_what_can_be_kept() -> None:
    slots = filled(1, LONG)
    prefix = find(slots, [*LONG[:BLOCK], 5, 5])
    assert prefix is not None
    assert slots.allocate("other", None, prefix) == 0
    assert slots.moves == [Move(0, BLOCK)]
    assert slots.evicted == len(LONG) - BLOCK
    slots.check()


def test_namespaces_never_meet() -> None:
    slots = Slots(2, 128)
    at = slots.allocate("a", ("one", ""))
    slots.extend(at, LONG)
    slots.release(at)
    assert find(slots, LONG, ("two", "")) is None
    assert find(slots, LONG, ("one", "salt")) is None
    assert find(slots, LONG, ("one", "")) is not None


def test_a_hash_collision_is_no_common_prefix() -> None:
    slots = filled(2, LONG)
    keys = block_keys(None, LONG, [])
    assert slots.find(None, [token + 1 for token in LONG], keys, len(LONG) - 1) is None


def test_who_catches_up_holds_what_the_other_has_computed() -> None:
    slots = Slots(2, 128)
    ahead, behind = slots.allocate("ahead"), slots.allocate("behind")
    slots.extend(ahead, LONG)
    slots.extend(behind, LONG[:3])
    prefix = find(slots, [*LONG, 4])
    assert prefix is not None
    slots.adopt(behind, prefix)
    assert (list(slots.held(behind)), slots.tokens) == (LONG, 2 * len(LONG))
    assert slots.moves == [Move(behind, len(LONG), ahead)]
    slots.check()


def test_what_failed_is_not_remembered() -> None:
    slots = Slots(1, 128)
    at = slots.allocate("failed")
    slots.extend(at, LONG)
    slots.release(at, remember=False)
    slots.check()
    assert (slots.warm, slots.warm_tokens, slots.free) == ([], 0, 1)


def test_the_longest_beginning_is_found_by_bisection() -> None:
    index = PrefixIndex()
    keys = block_keys("n", list(range(10 * BLOCK)), [])
    assert index.longest(keys) == (0, ())
    index.add(3, keys[:4])
    index.add(5, keys[:7])
    assert index.longest(keys) == (7, (5,))
    assert index.longest(keys[:4]) == (4, (3, 5))
    index.remove(5, keys[:7])
    assert index.longest(keys) == (4, (3,))
    index.remove(3, keys[:4])
    assert not index
