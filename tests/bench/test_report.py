"""Reports: percentiles, bars that decide the exit code, JSON that says where it comes from."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.__main__ import experiments, main
from bench.report import BenchError, Report, show
from bench.samples import percentiles


def test_percentiles_interpolate_between_neighbours() -> None:
    figures = percentiles([float(x) for x in range(1, 102)])
    assert figures == {"p50": 51, "p95": 96, "p99": 100, "mean": 51, "max": 101}
    assert percentiles([2.0])["p99"] == 2.0
    assert set(percentiles([]).values()) == {None}


@pytest.mark.parametrize(
    ("cell", "text"), [(None, "–"), (12345.6, "12,346"), (0.012345, "0.0123"), (1200, "1,200"), ("x", "x")]
)
def test_cells_are_short(cell: object, text: str) -> None:
    assert show(cell) == text


@pytest.mark.parametrize(("measured", "code"), [(2.5, 0), (2.49, 1), (math.nan, 1)])
def test_a_bar_is_met_at_its_bound_and_missed_below(
    tmp_path: Path, measured: float, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("demo", tmp_path)
    report.at_least("gain", measured, 2.5, "x")
    report.at_most("cost", 1.0, 1.0)
    assert report.finish({"gain": measured}) == code
    assert ("MISSED" in capsys.readouterr().out) == bool(code)


def test_json_keeps_its_keys_on_top_and_names_its_origin(tmp_path: Path) -> None:
    report = Report("demo", tmp_path / "deep" / "er")
    path = report.save({"rate": 1.0, "worst": math.inf})
    document = json.loads(path.read_text())
    assert document["rate"] == 1.0
    assert document["worst"] is None
    assert {"command", "commit", "machine", "date"} <= document["meta"].keys()
    assert document["meta"]["machine"]["cores"] >= 1


def test_partial_results_are_replaced_by_fuller_ones(tmp_path: Path) -> None:
    report = Report("demo", tmp_path)
    assert json.loads(report.save({"half": 1}).read_text())["complete"] is False
    assert report.finish({"half": 1, "whole": 2}) == 0
    document = json.loads((tmp_path / "demo.json").read_text())
    assert (document["whole"], document["complete"]) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]


def test_an_unwritable_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="cannot write to"):
        Report("demo", tmp_path / "file" / "out")


def test_piped_progress_says_each_tenth_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Report("demo", tmp_path).progress("load", 1000) as advance:
        for _ in range(1000):
            advance()
    assert capsys.readouterr().out.splitlines() == [f"load: {10 * i} %" for i in range(1, 11)]


def test_a_chart_is_a_picture(tmp_path: Path) -> None:
    with Report("demo", tmp_path).chart("side") as (_, axes):
        axes.plot([1, 2], [3, 4])
    assert (tmp_path / "demo-side.png").read_bytes().startswith(b"\x89PNG")


def test_help_lists_each_experiment_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for name, line in experiments().items():
        assert line
        assert f"  {name}" in text


def test_an_unknown_experiment_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swindle"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown experiment 'swindle'; choose from")
