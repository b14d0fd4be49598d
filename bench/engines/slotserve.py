"""Our own bare engine as a worker."""

from __future__ import annotations

from bench import bare
from bench.engines.worker import Job, Setup, serve
from bench.workload import Item, Workload


class Slotserve:
    """The default settings of a server: continuous batching, chunked prefill, exact."""

    version = "this tree"
    format = "fp32"

    def __init__(self, setup: Setup) -> None:
        model = bare.load(setup.model)
        self._engine = bare.build(model, slots=setup.slots, max_len=setup.max_len)

    def generate(self, jobs: list[Job]) -> list[list[int]]:
        items = (Item(f"r{i}", 0.0, tuple(prompt), tokens) for i, (prompt, tokens) in enumerate(jobs))
        return [t.output for t in bare.drive(self._engine, Workload("jobs", tuple(items))).requests]


if __name__ == "__main__":
    serve(Slotserve)
