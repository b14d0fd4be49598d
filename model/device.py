"""What a device does besides arithmetic, and memory that it shares with the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16
"""Bytes; where an array may begin."""


class Runtime(Protocol):
    """A device's queue of work. Nothing but `wait` waits for it."""

    def memory(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeroed uint8 [nbytes] on the host, where the device can fetch it, and on the device."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device when all that was asked for before is done."""
        ...

    def wait(self) -> None:
        """Until everything asked for so far is done."""
        ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """The kernels that `work` runs, to be run again on the same memory."""
        ...


class HostRuntime:
    """The host as its own device: everything is done at once, and nothing is recorded."""

    def memory(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See Runtime."""
        return torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Runtime."""
        target.copy_(source)

    def wait(self) -> None:
        """See Runtime."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See Runtime."""
        return work


class Block:
    """Named arrays in one piece of memory, on the host and on the device: one copy moves them all."""

    def __init__(
        self, runtime: Runtime, arrays: Mapping[str, tuple[type[np.generic], tuple[int, ...]]]
    ) -> None:
        self._runtime = runtime
        self._starts: dict[str, int] = {}
        end = 0
        for name, (kind, shape) in arrays.items():
            self._starts[name] = end
            end += -(-prod(shape) * np.dtype(kind).itemsize // ALIGNMENT) * ALIGNMENT
        self._on_host, self._on_device = runtime.memory(end)
        self.host: dict[str, npt.NDArray[Any]] = {}
        self.device: dict[str, torch.Tensor] = {}
        for name, (kind, shape) in arrays.items():
            start = self._starts[name]
            part = slice(start, start + prod(shape) * np.dtype(kind).itemsize)
            self.host[name] = self._on_host.numpy()[part].view(kind).reshape(shape)
            dtype = torch.from_numpy(self.host[name]).dtype
            self.device[name] = self._on_device[part].view(dtype).view(shape)

    def to_device(self) -> None:
        """Copy everything."""
        self._runtime.copy(self._on_device, self._on_host)

    def to_host(self, before: str | None = None) -> None:
        """Copy everything, or what stands before the array named."""
        end = None if before is None else self._starts[before]
        self._runtime.copy(self._on_host[:end], self._on_device[:end])
