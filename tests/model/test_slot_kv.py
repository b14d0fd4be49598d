"""Slots: who owns them, and that nothing is left behind."""

from __future__ import annotations

import pytest
import torch

from model.slot_kv import SlotKV


def make(num_slots: int = 2, *, poison: bool = False) -> SlotKV:
    return SlotKV(n_layer=2, num_slots=num_slots, n_kv_head=1, max_len=20, head_dim=4, poison=poison)


def test_slots_run_out_and_come_back() -> None:
    kv = make()
    first, second = kv.acquire(), kv.acquire()
    assert {first, second} == {0, 1}
    assert kv.free_slots == 0
    with pytest.raises(IndexError):
        kv.acquire()
    kv.release(first)
    assert kv.acquire() == first


def test_release_resets_the_length_at_once() -> None:
    kv = make()
    slot = kv.acquire()
    kv.lengths[slot] = 7
    assert kv.tokens == 7
    kv.release(slot)
    assert kv.tokens == 0


@pytest.mark.parametrize("slot", [0, -1, 2])
def test_only_held_slots_are_released(slot: int) -> None:
    with pytest.raises(ValueError, match=f"slot {slot} is not held"):
        make().release(slot)


def test_poison_fills_the_released_slot_and_no_other() -> None:
    kv = make(poison=True)
    kept, released = kv.acquire(), kv.acquire()
    kv.release(released)
    for cache in (kv.keys, kv.values):
        assert cache[:, released].isnan().all()
        assert not cache[:, [kept, kv.scratch]].isnan().any()


def test_clear_keeps_the_owner() -> None:
    kv = make(num_slots=1)
    slot = kv.acquire()
    kv.lengths[slot] = 3
    kv.clear(slot)
    assert kv.tokens == 0
    assert kv.free_slots == 0


@pytest.mark.parametrize(("num_slots", "max_len"), [(0, 8), (1, 0)])
def test_sizes_start_at_one(num_slots: int, max_len: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SlotKV(n_layer=1, num_slots=num_slots, n_kv_head=1, max_len=max_len, head_dim=4)


def test_cuda_slots_are_whole_pages() -> None:
    kv = SlotKV(
        n_layer=2, num_slots=3, n_kv_head=4, max_len=257, head_dim=8, device="meta", dtype=torch.bfloat16
    )
    assert kv.keys.shape == kv.values.shape == (2, 4, 512, 4, 8)
