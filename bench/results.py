"""Run every experiment and rebuild docs/results.md, its pictures and README's figures from their JSON."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.__main__ import experiments
from bench.compare import at_rate
from bench.origin import REPO
from bench.report import BenchError, Report, show

PAGE = REPO / "docs" / "results.md"
PICTURES = REPO / "docs" / "pictures"
README = REPO / "README.md"
OUTCOMES = {0: "all bars met", 1: "a bar missed", 2: "did not run"}
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


@dataclass(frozen=True)
class Entry:
    """One command of the page, and what it is shown under."""

    title: str
    experiment: str
    options: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return "-".join((self.experiment, *self.options[1:]))


ENTRIES = (
    Entry("Static against continuous batching", "compare"),
    Entry("Why the gain depends on the variance of output lengths", "compare", ("--sweep", "variance")),
    Entry("A long prompt among steady decoders", "spike"),
    Entry("Prompts that arrive together", "prefill"),
    Entry("Same answer, whatever else runs", "exactness"),
    Entry("The engine against its own linear layers", "throughput"),
    Entry("Where a step's time goes", "gap"),
    Entry("Beside other engines", "peers"),
    Entry("Tokens as others read them", "tokens"),
    Entry("A KV pool that is too small", "starve"),
    Entry("Two tenants", "fair"),
    Entry("Urgent requests", "priority"),
    Entry("The cost of a plan", "scheduler"),
    Entry("The cost of watching", "tracing"),
    Entry("The cost of an open page", "watching"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(entry.key for entry in ENTRIES)
    parser.add_argument("--only", nargs="*", metavar="NAME", help=f"run these again, of {names}")
    parser.add_argument("--rebuild", action="store_true", help="run nothing; rebuild from the JSON in --out")


def run(args: argparse.Namespace) -> int:
    report = Report("results", args.out)
    keys = [entry.key for entry in ENTRIES]
    for name in args.only or ():
        if name not in keys:
            raise BenchError(f"unknown entry {name!r}; choose from {', '.join(keys)}")
    outcomes: dict[str, int] = {}
    minutes: dict[str, float] = {}
    for entry in () if args.rebuild else ENTRIES:
        if entry.experiment in experiments() and (not args.only or entry.key in args.only):
            report.say(f"\n[bold]{entry.title}[/]")
            started = time.monotonic()
            command = [sys.executable, "-m", "bench", entry.experiment, *entry.options]
            done = subprocess.run([*command, "--out", str(args.out / entry.key)], cwd=REPO)
            outcomes[entry.key] = done.returncode
            minutes[entry.key] = (time.monotonic() - started) / 60
    rows = [(key, minutes[key], OUTCOMES.get(code, f"exit {code}")) for key, code in outcomes.items()]
    report.table("Experiments", ["", "minutes", "outcome"], rows)
    found = _documents(args.out)
    documents = {key: document for key, document in found.items() if _is_complete(document)}
    cut_short = found.keys() - documents.keys()
    for key in sorted(cut_short):
        report.say(f"{key}: its JSON is of a run that did not end; its section stays as it was")
    if not documents:
        raise BenchError(f"no results in {args.out}")
    _write_page(documents, args.out)
    report.say(f"wrote {PAGE.relative_to(REPO)} and {PICTURES.relative_to(REPO)}")
    if documents.get("compare", {}).get("open") and BEGIN in README.read_text():
        _write_readme(documents["compare"])
        report.say("wrote README.md's figures")
    report.finish({"outcomes": outcomes})
    codes = set(outcomes.values())
    return 2 if cut_short or codes - {0, 1} else max(codes, default=0)


def _documents(out: Path) -> dict[str, dict[str, Any]]:
    """The JSON of each entry that has some, by the entry's key."""
    found = {}
    for entry in ENTRIES:
        paths = sorted((out / entry.key).glob("*.json"))
        plain = [path for path in paths if not path.name.endswith(".trace.json")]
        if plain:
            try:
                found[entry.key] = json.loads(plain[0].read_text())
            except ValueError as error:
                raise BenchError(f"{plain[0]} is not JSON: {error}") from error
    return found


def _is_complete(document: dict[str, Any]) -> bool:
    # Older JSON lacks the key; there only a finished run has bars.
    return bool(document.get("complete", document["bars"]))


def _write_page(documents: dict[str, dict[str, Any]], out: Path) -> None:
    """A section for each document; those of the other entries stay."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Results",
        "",
        "`make results` writes this page from the JSON of each experiment; nothing is typed by hand. Each",
        "section names its command, commit, machine and date. Times on a small shared machine drift by some",
        "20 %, so compare figures within a section: both sides of a comparison ran in one command.",
        "",
    ]
    before = _sections()
    for entry in ENTRIES:
        if entry.key in documents:
            lines += _section(entry, documents[entry.key], out / entry.key)
        elif entry.title in before:
            lines += [before[entry.title], ""]
    PAGE.write_text("\n".join(lines).rstrip() + "\n")


def _sections() -> dict[str, str]:
    """The sections of the page as it stands, by title."""
    text = PAGE.read_text() if PAGE.exists() else ""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0].removeprefix("## "): part.rstrip() for part in parts}


def _section(entry: Entry, document: dict[str, Any], directory: Path) -> list[str]:
    meta = document["meta"]
    machine = meta["machine"]
    where = ", ".join([machine["cpu"], f"{machine['cores']} cores", machine["vector"], *machine["gpus"]])
    lines = [
        f"## {entry.title}",
        "",
        f"`{_command(meta)}` at `{meta['commit']}`, {meta['date'][:16].replace('T', ' ')} UTC; {where}, "
        f"{machine['memory_gib']:.0f} GiB; torch {machine['torch']}, ray {machine['ray']}.",
        "",
    ]
    if document["bars"]:
        lines += ["| bar | measured | bound | |", "| --- | ---: | ---: | --- |"]
        lines += [
            f"| {bar['what']} | {show(bar['measured'])}{bar['unit']} | "
            f"{bar['relation']} {show(bar['bound'])}{bar['unit']} | {'met' if bar['met'] else '**missed**'} |"
            for bar in document["bars"]
        ]
        lines.append("")
    for picture in sorted(directory.glob("*.png"), key=lambda path: (len(path.stem), path.stem)):
        shutil.copyfile(picture, PICTURES / picture.name)
        lines += [f"![{entry.title}: {picture.stem}](pictures/{picture.name})", ""]
    for note in document["notes"]:
        lines += [note, ""]
    for table in document["tables"]:
        lines += _markdown(table["title"], table["columns"], table["rows"])
    return lines


def _markdown(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"**{title}**",
        "",
        f"| {' | '.join(columns)} |",
        f"| --- {'| ---: ' * (len(columns) - 1)}|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def _write_readme(document: dict[str, Any]) -> None:
    """The chart and three figures between README's markers."""
    closed, meta, opened = document["closed"], document["meta"], document["open"]
    static, continuous = closed["static"], closed["continuous"]
    gain = continuous["tokens_per_s"] / static["tokens_per_s"]
    block = [
        BEGIN,
        "![Static against continuous batching](docs/pictures/compare.png)",
        "",
        f"- **{gain:.1f}x** the output tokens/s of static batching ({continuous['tokens_per_s']:.0f} against "
        f"{static['tokens_per_s']:.0f}) while requests wait,",
        f"- **{continuous['utilization_while_waiting']:.0%}** of the slots' time at work meanwhile "
        f"(static: {static['utilization_while_waiting']:.0%}),",
        f"- **{opened['ttft_gain']:.1f}x** sooner first token at p95, when requests arrive at",
        f"  {at_rate(opened)}.",
        "",
        f"`{_command(meta)}` at `{meta['commit']}` on {meta['machine']['cores']} cores; "
        "[all results](docs/results.md), [how it works](docs/continuous-batching.md).",
        END,
    ]
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    README.write_text(before + "\n".join(block) + rest.partition(END)[2])


def _command(meta: dict[str, Any]) -> str:
    """The command as it was given, with its own directory left out."""
    return re.sub(r"--out \S+", "--out DIR", meta["command"])
