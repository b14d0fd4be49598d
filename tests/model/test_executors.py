"""Which executor a device gets, and how many slots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.config import ModelError
from model.device_executor import DeviceExecutor
from model.executors import GB, build_executor, slots_that_fit
from model.loader import choose_backend, load_model
from tests.model.test_transformer import save_random_model


def test_a_cpu_has_the_slots_that_it_is_told_to_have(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama")
    executor = build_executor(load_model(tmp_path, device="cpu"), 3, 16)
    assert not isinstance(executor, DeviceExecutor)
    assert (executor.num_slots, executor.max_len) == (3, 16)


def test_slots_fill_what_the_weights_and_a_step_leave() -> None:
    total, weights, step, slot = 141 * GB, 16 * GB, 2 * GB, GB // 4
    fitting = slots_that_fit(total, weights, step, slot, 0.9)
    # One more is scratch; another would not fit.
    assert weights + step + (fitting + 1) * slot <= 0.9 * total < weights + step + (fitting + 2) * slot


def test_memory_that_holds_no_slot_is_told_in_figures() -> None:
    with pytest.raises(ModelError, match=r"of 24.0 GB, 16.0 are taken.* leaves 3.6 GB .* need 4.0"):
        slots_that_fit(24 * GB, 16 * GB, 2 * GB, 2 * GB, 0.9)
    assert slots_that_fit(24 * GB, 16 * GB, 2 * GB, 2 * GB, 0.92) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_usable_cuda_device_the_reason_is_told() -> None:
    with pytest.raises(ModelError, match=r"torch can use no CUDA device here: .*\w"):
        choose_backend("cuda", None)
