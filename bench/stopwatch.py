"""The time inside a model's parts: who calls them is timed, not who they are."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from model.transformer import Transformer

PARTS = ("linear layers", "output head", "attention", "norms and activation")


@contextmanager
def stopwatch(model: Transformer) -> Iterator[dict[str, float]]:
    """Seconds by part, which grow until the block ends. Waits for the device, so it slows a GPU down."""
    seconds: dict[str, float] = defaultdict(float)
    head, backend = model.weights.head, type(model.backend)
    attention = type(model.attention)
    originals: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, part: Callable[[object], str]) -> None:  # noqa: ANN401 - any class
        original = getattr(owner, name)

        def timed(self: object, *args: Any) -> Any:  # noqa: ANN401 - whatever it takes and returns
            started = time.perf_counter()
            result = original(self, *args)
            wait(model)
            seconds[part(self)] += time.perf_counter() - started
            return result

        originals.append((owner, name, original))
        setattr(owner, name, timed)

    layer = model.weights.layers[0]
    for kind in {type(linear) for linear in (head, layer.qkv, layer.output, layer.gate_up, layer.down)}:
        patch(kind, "__call__", lambda it: PARTS[1] if it is head else PARTS[0])
    for name in ("begin", "__call__"):
        patch(attention, name, lambda _: PARTS[2])
    for name in ("add_rms_norm", "silu_mul"):
        patch(backend, name, lambda _: PARTS[3])
    try:
        yield seconds
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def wait(model: Transformer) -> None:
    """Until the device has done all it was told."""
    if model.backend.device.type == "cuda":
        torch.cuda.synchronize(model.backend.device)
