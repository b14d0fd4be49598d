"""Slots: who owns them, what they hold, and that nothing is left behind."""

from __future__ import annotations

import pytest

from engine_actor.slots import Slots


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


def test_a_released_slot_holds_nothing_and_is_forgotten_once() -> None:
    forgotten: list[int] = []
    slots = Slots(2, 8, forgotten.append)
    slot = slots.allocate("a")
    slots.extend(slot, [5, 6, 7])
    slots.extend(slot, [8])
    assert list(slots.held(slot)) == [5, 6, 7, 8]
    assert slots.tokens == 4
    slots.release(slot)
    assert (slots.tokens, list(slots.held(slot)), forgotten) == (0, [], [slot])


def test_clear_keeps_the_owner_and_the_contents() -> None:
    forgotten: list[int] = []
    slots = Slots(1, 8, forgotten.append)
    slot = slots.allocate("a")
    slots.extend(slot, [1])
    slots.clear(slot)
    assert (slots.tokens, slots.free, slots.owner(slot), forgotten) == (0, 0, "a", [])


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
    slots.extend(0, [1, 2, 3])
    with pytest.raises(AssertionError, match="more than it can"):
        slots.check()
    twice = Slots(2, 2)
    twice.allocate("a")
    twice.allocate("a")
    with pytest.raises(AssertionError, match="two slots"):
        twice.check()
