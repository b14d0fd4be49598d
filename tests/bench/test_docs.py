"""The explanation can be read aloud in a minute, and all that it points at exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from bench.__main__ import experiments
from bench.origin import REPO

PAGE = REPO / "docs" / "continuous-batching.md"
POINTERS = re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)", PAGE.read_text())


def symbols(path: Path) -> set[str]:
    """Functions and classes of a module, and methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
            found |= {f"{node.name}.{sub.name}" for sub in ast.walk(node) if isinstance(sub, ast.FunctionDef)}
    return found


def test_the_short_version_takes_a_minute() -> None:
    short = PAGE.read_text().partition("## In 60 seconds")[2].partition("\n## ")[0]
    assert 120 <= len(short.split()) <= 155


@pytest.mark.parametrize(("symbol", "path"), POINTERS)
def test_every_pointer_into_the_code_leads_somewhere(symbol: str, path: str) -> None:
    assert symbol in symbols(REPO / path)


def test_every_experiment_that_is_named_exists() -> None:
    named = set(re.findall(r"`(?:python -m )?bench (\w+)", PAGE.read_text()))
    assert named <= experiments().keys()
