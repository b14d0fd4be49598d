"""The arrays of the slots, in each backend's layout, and what poison leaves."""

from __future__ import annotations

import pytest
import torch

from model.cpu.backend import CpuBackend
from model.cuda import CudaBackend
from model.executor import Move
from model.model_executor import ModelExecutor
from model.storage import SlotStorage
from tests.fakes import FakeModel


def make(num_slots: int = 2, max_len: int = 20, *, poison: bool = False) -> SlotStorage:
    return CpuBackend().storage(
        n_layer=2, num_slots=num_slots, n_kv_head=1, max_len=max_len, head_dim=4, poison=poison
    )


def test_poison_fills_the_forgotten_slot_and_no_other() -> None:
    storage = make(poison=True)
    storage.forget(1)
    for cache in (storage.keys, storage.values):
        assert cache[:, 1].isnan().all()
        assert not cache[:, [0, storage.scratch]].isnan().any()


def test_without_poison_forgetting_costs_nothing() -> None:
    storage = make()
    storage.forget(0)
    assert not storage.keys.any()


@pytest.mark.parametrize(("num_slots", "max_len"), [(0, 8), (1, 0)])
def test_sizes_start_at_one(num_slots: int, max_len: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make(num_slots, max_len)


def test_cuda_slots_are_whole_pages() -> None:
    backend = CudaBackend(torch.device("meta"), torch.bfloat16)
    storage = backend.storage(n_layer=2, num_slots=3, n_kv_head=4, max_len=257, head_dim=8)
    assert storage.keys.shape == storage.values.shape == (2, 4, 512, 4, 8)
    assert (storage.num_slots, storage.max_len) == (3, 257)


@pytest.mark.parametrize("length", [1, 5, 16, 20])
@pytest.mark.parametrize("backend", [CpuBackend(), CudaBackend(torch.device("cpu"), torch.float32)])
def test_a_copy_brings_so_many_positions_and_poison_the_rest(
    backend: CpuBackend | CudaBackend, length: int
) -> None:
    def by_position(part: torch.Tensor, slot: int) -> torch.Tensor:
        """[layer, position, head, head_dim] of one slot."""
        if isinstance(backend, CudaBackend):
            return part[:, slot, :20]
        if part is storage.keys:
            return part[:, slot].permute(0, 2, 4, 1, 3).flatten(1, 2)[:, :20]
        return part[:, slot, :, :20].transpose(1, 2)

    storage = backend.storage(n_layer=2, num_slots=2, n_kv_head=3, max_len=20, head_dim=4, poison=True)
    generator = torch.Generator().manual_seed(1)
    for part in (storage.keys, storage.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    before = [by_position(part, 0).clone() for part in (storage.keys, storage.values)]
    ModelExecutor(FakeModel(), storage).arrange([Move(1, length, 0)])
    for part, expected in zip((storage.keys, storage.values), before, strict=True):
        assert torch.equal(by_position(part, 0), expected)
        assert torch.equal(by_position(part, 1)[:, :length], expected[:, :length])
        assert by_position(part, 1)[:, length:].isnan().all()
