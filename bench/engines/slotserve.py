"""Our own bare engine as a worker, with a server's default settings but for reuse of prefixes."""

from __future__ import annotations

from bench import bare
from bench.engines.worker import Generate, Job, Setup, serve
from bench.workload import Item, Workload


def build(setup: Setup) -> Generate:
    model = bare.load(setup.model)
    engine = bare.build(model, slots=setup.slots, max_len=setup.max_len)

    def generate(jobs: list[Job]) -> list[list[int]]:
        items = (Item(f"r{i}", 0.0, tuple(prompt), tokens) for i, (prompt, tokens) in enumerate(jobs))
        return [t.output for t in bare.drive(engine, Workload("jobs", tuple(items))).requests]

    return generate


if __name__ == "__main__":
    serve(build, version="this tree", numbers="fp32")
