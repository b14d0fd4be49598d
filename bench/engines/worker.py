"""An engine in a process, and perhaps an environment, of its own: jobs in, results out, as JSON lines.

Only the standard library here: this runs in every peer's environment.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Job: TypeAlias = tuple[list[int], int]
"""Prompt token ids, and how many tokens to generate: greedy, end of sequence ignored."""
Generate: TypeAlias = Callable[[list[Job]], list[list[int]]]
"""Completes all jobs, which arrive at once, `slots` at a time; token ids in the jobs' order."""


@dataclass(frozen=True)
class Setup:
    """What an engine is built from; the worker's command line, as JSON."""

    model: str
    slots: int
    max_len: int
    threads: int


def serve(build: Callable[[Setup], Generate], *, version: str, numbers: str) -> None:
    """Answer each line on stdin with a line on stdout, until stdin ends. `numbers`: what it computes with."""
    # Libraries print to stdout; the answers must not mix with that.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate = build(Setup(**json.loads(sys.argv[1])))
    print(json.dumps({"version": version, "format": numbers}), file=answers)
    for line in sys.stdin:
        jobs = [(prompt, tokens) for prompt, tokens in json.loads(line)]
        started = time.perf_counter()
        outputs = generate(jobs)
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": seconds, "outputs": outputs, "peak_mib": peak}), file=answers)
