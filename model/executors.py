"""A model to what executes it: on a GPU, with as many slots as its memory holds."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from model.config import ModelError
from model.cuda import CudaRuntime
from model.device_executor import DeviceExecutor
from model.device_step import DeviceStep
from model.model_executor import ModelExecutor
from model.transformer import Transformer

log = logging.getLogger(__name__)

GB = 10**9


def build_executor(
    model: Transformer, num_slots: int, max_len: int, *, memory_fraction: float = 0.9
) -> ModelExecutor:
    """The executor for the model's device, with `num_slots` slots of `max_len` tokens.

    On a GPU, fewer if no more fit into `memory_fraction` of its memory beside the weights and what a step
    needs. Raises ModelError if none does.
    """
    device = model.backend.device
    if device.type != "cuda":
        return ModelExecutor(model, model.new_storage(num_slots, max_len))
    fitting = _measured(model, max_len, memory_fraction)
    if fitting < num_slots:
        log.warning("%d slots of %d tokens fit on the device, not %d", fitting, max_len, num_slots)
    storage = model.new_storage(min(num_slots, fitting), max_len)
    return DeviceExecutor(model, storage, CudaRuntime(device))


class _Once(CudaRuntime):
    """Runs what it should record, once: the largest steps show how much memory they need."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See Runtime."""
        work()
        return work


def _measured(model: Transformer, max_len: int, memory_fraction: float) -> int:
    device = model.backend.device
    free, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    storage = model.new_storage(1, max_len)
    slot = storage.nbytes // 2  # one slot and the scratch slot
    DeviceStep(model, storage, _Once(device))
    step = torch.cuda.max_memory_allocated(device) - weights - storage.nbytes
    del storage
    torch.cuda.empty_cache()
    try:
        return slots_that_fit(total, total - free, step, slot, memory_fraction)
    except ModelError as error:
        name = torch.cuda.get_device_name(device)
        raise ModelError(f"{name}: {error}; lower max_len, which is {max_len}") from None


def slots_that_fit(total: int, taken: int, step: int, slot: int, memory_fraction: float) -> int:
    """How many slots, beside the scratch slot, a device's memory holds. Sizes in bytes.

    taken: by weights and whatever else is there. Raises ModelError if it is none.
    """
    room = int(memory_fraction * total) - taken - step
    fitting = room // slot - 1
    if fitting < 1:
        raise ModelError(
            f"of {total / GB:.1f} GB, {taken / GB:.1f} are taken, weights included, and a step needs "
            f"{step / GB:.1f}: with gpu_memory_fraction {memory_fraction} that leaves "
            f"{max(room, 0) / GB:.1f} GB for keys and values, and two slots need {2 * slot / GB:.1f}"
        )
    return fitting
