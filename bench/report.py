"""How every experiment speaks: progress, tables, bars, JSON with its origin, charts of one style."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bench.chart import drawn
from bench.origin import origin


class BenchError(Exception):
    """The experiment cannot go on; the message is one line a person can act on."""


class Advance(Protocol):
    """Reports work done since the last call."""

    def __call__(self, steps: float = 1.0) -> None: ...


@dataclass(frozen=True)
class Bar:
    """A figure and the bound it has to keep."""

    what: str
    measured: float
    relation: Literal["at least", "at most"]
    bound: float
    unit: str = ""

    @property
    def met(self) -> bool:
        return self.measured >= self.bound if self.relation == "at least" else self.measured <= self.bound

    def __str__(self) -> str:
        bound = f"{self.relation} {show(self.bound)}{self.unit}"
        return f"{self.what}: {show(self.measured)}{self.unit} ({bound})"


class Report:
    """Results of one experiment in the directory `out`, written as they come.

    Raises BenchError when `out` cannot be written.
    """

    def __init__(self, name: str, out: Path) -> None:
        self.name = name
        self.out = out
        self.bars: list[Bar] = []
        self._tables: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self.console = Console(width=None if sys.stdout.isatty() else 130, highlight=False)
        self._origin = origin()
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(f"cannot write to {out}: {error.strerror}") from error

    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(line)

    def note(self, line: str) -> None:
        """Print what a reader should see in the figures, and keep it with them."""
        self._notes.append(line)
        self.console.print(line)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print rows; floats with three significant digits, None as a dash."""
        cells = [[show(cell) for cell in row] for row in rows]
        self._tables.append({"title": title, "columns": list(columns), "rows": cells})
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in cells:
            table.add_row(*row)
        self.console.print(table)

    def records(self, title: str, records: Sequence[Mapping[str, Any]], columns: str = "") -> None:
        """A row for each record. Columns: "heading: path | ...", where a dotted path leads to the cell;
        the first record's keys where there are none."""
        split = columns.split(" | ") if columns else list(records[0])
        paths = [column.rpartition(": ")[2] for column in split]
        heads = [column.rpartition(": ")[0] or column for column in split]
        self.table(title, heads, [[_at(record, path) for path in paths] for record in records])

    def at_least(self, what: str, measured: float, bound: float, unit: str = "") -> None:
        self.bars.append(Bar(what, measured, "at least", bound, unit))

    def at_most(self, what: str, measured: float, bound: float, unit: str = "") -> None:
        self.bars.append(Bar(what, measured, "at most", bound, unit))

    def save(self, data: Mapping[str, Any], *, complete: bool = False) -> Path:
        """Write `<name>.json`: the data's own keys, then "bars", "tables", "notes", "meta" and "complete".
        Call it for each part that is ready: an interrupted experiment keeps what it has."""
        path = self.out / f"{self.name}.json"
        bars = [asdict(bar) | {"met": bar.met} for bar in self.bars]
        shown = {"bars": bars, "tables": self._tables, "notes": self._notes, "meta": self._origin}
        partial = path.with_suffix(".json.partial")
        partial.write_text(json.dumps(_jsonable({**data, **shown, "complete": complete}), indent=1) + "\n")
        partial.replace(path)
        return path

    def finish(self, data: Mapping[str, Any]) -> int:
        """Save as complete, print each bar as met or missed, and return the exit code."""
        self.say(f"wrote {self.save(data, complete=True)}")
        for bar in self.bars:
            self.say(f"{'[green]met   [/]' if bar.met else '[bold red]MISSED[/]'}  {bar}")
        return 0 if all(bar.met for bar in self.bars) else 1

    @contextmanager
    def progress(self, what: str, total: float) -> Iterator[Advance]:
        """A moving bar on a terminal; a line for each tenth of the way where output is piped."""
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        piped = not self.console.is_terminal
        with Progress(*columns, *times, console=self.console, disable=piped) as bar:
            task = bar.add_task(what, total=total or 1)
            told = 0

            def advance(steps: float = 1.0) -> None:
                nonlocal told
                bar.advance(task, steps)
                tenth = int(bar.tasks[task].percentage / 10)
                if piped and tenth > told:
                    told = tenth
                    self.say(f"{what}: {10 * tenth} %")

            yield advance

    @contextmanager
    def chart(
        self, suffix: str = "", *, rows: int = 1, columns: int = 1, size: tuple[float, float] = (10, 5.6)
    ) -> Iterator[tuple[Any, Any]]:
        """A matplotlib (figure, axes) in the house style, saved as `<name>[-suffix].png` on leaving."""
        path = self.out / f"{self.name}{'-' if suffix else ''}{suffix}.png"
        with drawn(path, rows, columns, size) as (figure, axes):
            yield figure, axes
        self.say(f"wrote {path}")


def _at(record: Any, path: str) -> object:  # noqa: ANN401 - JSON
    first, _, rest = path.partition(".")
    found = record.get(first)
    return _at(found, rest) if rest else found


def show(cell: object) -> str:
    """A figure as a table shows it."""
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 or cell == 0 else f"{cell:.3g}"
    return "–" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell)


def _jsonable(value: object) -> object:
    """Plain JSON: NaN and infinity become null, NumPy scalars become numbers."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
