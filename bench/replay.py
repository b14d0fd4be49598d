"""A trace in the layout of the Azure LLM inference traces as a workload: when, how long, how much."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.report import BenchError
from bench.workload import VOCAB, Item, Workload, random_tokens

COLUMNS = (
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
)


def from_trace(
    path: Path,
    *,
    max_len: int,
    requests: int | None = None,
    time_scale: float = 1.0,
    seed: int = 0,
    vocab: int = VOCAB,
) -> Workload:
    """Replay `path`: seconds or a date and time, prompt tokens, output tokens.

    `time_scale` 2 plays it at half its pace. Lengths shrink by one factor at which 99 % of the
    requests fit `max_len`; the others are cut. Raises BenchError naming the line of a malformed row.
    """
    rows = _rows(path, requests)
    rng = np.random.default_rng(seed)
    start = rows[0][0]
    shrink = min(1.0, max_len / float(np.percentile([p + o for _, p, o in rows], 99)))
    items = []
    for i, (time, prompt, output) in enumerate(rows):
        if time < start:
            raise BenchError(f"{path}, line {i + 2}: arrives before the first request")
        outputs = min(max(1, round(output * shrink)), max_len - 1)
        prompts = min(max(1, round(prompt * shrink)), max_len - outputs)
        items.append(
            Item(f"r{i:04}", (time - start) * time_scale, random_tokens(prompts, vocab, rng), outputs)
        )
    return Workload(path.stem, tuple(sorted(items, key=lambda item: item.arrival)))


def _rows(path: Path, most: int | None) -> list[tuple[float, int, int]]:
    rows: list[tuple[float, int, int]] = []
    try:
        with path.open(newline="") as file:
            reader = csv.reader(file)
            if tuple(next(reader, ())) not in COLUMNS:
                expected = " or ".join(",".join(columns) for columns in COLUMNS)
                raise BenchError(f"{path}, line 1: expected the header {expected}")
            for row in reader:
                rows.append(_row(path, reader.line_num, row))
                if len(rows) == most:
                    break
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BenchError(f"cannot read the trace {path}: {error}") from error
    if not rows:
        raise BenchError(f"{path}, line 2: the trace has no requests")
    return rows


def _row(path: Path, line: int, row: Sequence[str]) -> tuple[float, int, int]:
    try:
        time, prompt, output = row
        found = _seconds(time), int(prompt), int(output)
        if not (math.isfinite(found[0]) and min(found[1:]) > 0):
            raise ValueError
    except ValueError:
        raise BenchError(
            f"{path}, line {line}: expected time,prompt tokens,output tokens (both at least 1), "
            f"got {','.join(row)!r}"
        ) from None
    return found


def _seconds(time: str) -> float:
    try:
        return float(time)
    except ValueError:
        return float(np.datetime64(time).astype("M8[us]").astype(int)) / 1e6
