"""Charts in the house style, and the kinds that several experiments draw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

CONTINUOUS, STATIC = "#1F6FB2", "#E4572E"
"""The two sides of the head-to-head, in every picture."""
PALETTE = [CONTINUOUS, STATIC, "#2CA58D", "#8E6BBF", "#F0A202", "#5C6B73"]
INK, MUTED, FAINT = "#1B1F24", "#6B7480", "#E3E6EA"
Axes: TypeAlias = Any
"""matplotlib has no types."""


@contextmanager
def drawn(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """A matplotlib (figure, axes), saved to `path` on leaving."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.style.context(Path(__file__).with_name("house.mplstyle")):
        figure, axes = pyplot.subplots(rows, columns, figsize=size)
        yield figure, axes
        figure.savefig(path)
        pyplot.close(figure)


def columns(
    axes: Axes,
    groups: Sequence[object],
    series: Mapping[str, Sequence[float]],
    *,
    up_to: Mapping[str, Sequence[float]] | None = None,
    form: str = "",
) -> None:
    """Bars in groups, one of each series. `up_to`: a line from each bar up to there; `form`: of a label."""
    places, width = np.arange(len(groups)), 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        at = places + (index - (len(series) - 1) / 2) * width
        bars = axes.bar(at, values, 0.9 * width, label=name)
        if up_to is not None:
            axes.vlines(at, values, up_to[name], color=MUTED, linewidth=1.2)
        if form:
            axes.bar_label(bars, [form.format(value) for value in values], padding=3, fontsize=11)
    axes.set_xticks(places, [str(group) for group in groups])
    axes.margins(y=0.12)


def rows(axes: Axes, values: Mapping[str, float], labels: Sequence[str], colours: Sequence[str]) -> None:
    """Bars that lie, the first on top, each with its label at its end."""
    for height, (value, label) in enumerate(zip(values.values(), labels, strict=True)):
        axes.barh(height, value, color=colours[height], height=0.62)
        axes.annotate(f" {label}", (value, height), va="center", color=INK)
    axes.set_yticks(range(len(values)), list(values))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def dots(axes: Axes, sides: Mapping[str, Sequence[float]], marks: Mapping[str, Mapping[str, float]]) -> None:
    """A row of dots for each side, the first on top, with strokes across it and a word at each."""
    for height, (name, values) in enumerate(sides.items()):
        colour = PALETTE[height]
        spread = height + np.linspace(-0.18, 0.18, len(values))
        axes.scatter(values, spread, s=26, color=colour, alpha=0.55, linewidths=0)
        for word, at in marks[name].items():
            axes.vlines(at, height - 0.28, height + 0.28, color=colour)
            axes.annotate(word, (at, height - 0.31), ha="center", fontsize=10, color=colour)
    axes.set_yticks(range(len(sides)), list(sides))
    axes.set_ylim(len(sides) - 0.45, -0.6)


def doublings(axes: Axes, ticks: Sequence[int]) -> None:
    """An x axis on which each doubling is as wide as the next."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
