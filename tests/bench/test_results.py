"""The page of results: rebuilt from JSON, and what has no new JSON stays as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from bench import results
from bench.__main__ import main
from bench.report import Report

SPIKE, FAIR = "A long prompt among steady decoders", "Two tenants"


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone in which the page, its pictures and README may be written."""
    monkeypatch.setattr(results, "PAGE", tmp_path / "results.md")
    monkeypatch.setattr(results, "PICTURES", tmp_path / "pictures")
    monkeypatch.setattr(results, "REPO", tmp_path)
    monkeypatch.setattr(results, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text("no markers")
    return tmp_path


def experiment(repo: Path, name: str, note: str) -> Report:
    """An experiment that has its figures; it is not finished."""
    report = Report(name, repo / "out" / name)
    report.note(note)
    report.save({})
    return report


def rebuild(repo: Path) -> int:
    return main(["results", "--rebuild", "--out", str(repo / "out")])


def test_the_page_is_rebuilt_from_json(repo: Path) -> None:
    report = Report("spike", repo / "out" / "spike")
    report.table("Stalls", ["mode", "ms"], [["separate", 1234.5]])
    report.note("What to see: a stall.")
    report.at_most("worst / median", 3.0, 2.0, "x")
    with report.chart() as (_, axes):
        axes.plot([1, 2])
    assert report.finish({}) == 1
    assert rebuild(repo) == 0
    page = (repo / "results.md").read_text()
    for expected in (
        f"## {SPIKE}",
        "| worst / median | 3x | at most 2x | **missed** |",
        "| separate | 1,234 |",
        "What to see: a stall.",
        "(pictures/spike.png)",
        json.loads((repo / "out/spike/spike.json").read_text())["meta"]["commit"],
    ):
        assert expected in page
    assert (repo / "pictures/spike.png").exists()


def test_sections_without_json_stay_where_they_were(repo: Path) -> None:
    for name in ("spike", "fair"):
        experiment(repo, name, f"the first {name}").finish({})
    assert rebuild(repo) == 0
    first = (repo / "results.md").read_text()
    (repo / "out" / "spike" / "spike.json").unlink()
    experiment(repo, "fair", "the second fair").finish({})
    assert rebuild(repo) == 0
    second = (repo / "results.md").read_text()
    assert second.partition(f"## {FAIR}")[0] == first.partition(f"## {FAIR}")[0]
    assert "the first spike" in second
    assert "the second fair" in second
    assert "the first fair" not in second
    assert rebuild(repo) == 0
    assert (repo / "results.md").read_text() == second


def test_a_run_that_did_not_end_is_not_published(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment(repo, "spike", "the first spike").finish({})
    assert rebuild(repo) == 0
    experiment(repo, "spike", "half a spike")
    experiment(repo, "fair", "a fair").finish({})
    assert rebuild(repo) == 2
    page = (repo / "results.md").read_text()
    assert "the first spike" in page
    assert "half a spike" not in page
    assert "a fair" in page
    assert "spike: its JSON is of a run that did not end" in capsys.readouterr().out


def test_json_of_before_the_key_is_complete_if_it_has_bars(repo: Path) -> None:
    report = experiment(repo, "spike", "an old spike")
    path = repo / "out" / "spike" / "spike.json"
    document: dict[str, Any] = json.loads(path.read_text())
    del document["complete"]
    path.write_text(json.dumps(document))
    assert rebuild(repo) == 2
    report.at_most("worst / median", 1.0, 2.0)
    document = json.loads(report.save({}).read_text())
    del document["complete"]
    path.write_text(json.dumps(document))
    assert rebuild(repo) == 0


@pytest.mark.parametrize(("code", "outcome"), [(0, 0), (1, 1), (2, 2), (-9, 2), (130, 2)])
def test_an_experiment_that_fails_or_is_killed_is_no_success(
    repo: Path, monkeypatch: pytest.MonkeyPatch, code: int, outcome: int
) -> None:
    run = subprocess.run

    def stub(command: list[str], **options: Any) -> CompletedProcess[Any]:
        if command[0] != sys.executable:
            return run(command, **options)
        experiment(repo, command[3], "a spike").finish({})
        return CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", stub)
    assert main(["results", "--only", "spike", "--out", str(repo / "out")]) == outcome


def test_readme_says_what_the_rate_is_for_each_side(repo: Path) -> None:
    (repo / "README.md").write_text(f"Before.\n{results.BEGIN}\nold\n{results.END}\nAfter.\n")
    sides = {
        side: {"tokens_per_s": rate, "requests_per_s": rate / 50, "utilization_while_waiting": rate / 200}
        for side, rate in (("static", 50.0), ("continuous", 140.0))
    }
    rates = [
        {
            "share": share,
            "requests_per_s": share * 2.8,
            "of_static": share * 2.8,
            "ttft_gain": gain,
            "static": {"ttft_p95": 12.0},
            "continuous": {"ttft_p95": 12.0 / gain},
        }
        for share, gain in ((0.35, 13.0), (0.7, 6.58))
    ]
    data = {"closed": sides, "rates": rates, "open": rates[1]}
    Report("compare", repo / "out" / "compare").finish(data)
    assert rebuild(repo) == 0
    readme = (repo / "README.md").read_text()
    assert readme.startswith(f"Before.\n{results.BEGIN}\n")
    assert readme.endswith(f"{results.END}\nAfter.\n")
    assert "**2.8x** the output tokens/s of static batching (140 against 50)" in readme
    assert "**6.6x** sooner first token at p95" in readme
    assert (
        "70% of the rate that continuous batching can serve (2 times the rate that static batching can)"
        in readme
    )
    assert "old" not in readme


def test_nothing_to_rebuild_is_one_line(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rebuild(repo) == 2
    assert "error: no results in" in capsys.readouterr().err
    assert not (repo / "results.md").exists()
