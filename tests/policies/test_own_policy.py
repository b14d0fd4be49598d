"""The policy of one's own that README shows, run as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from engine_actor.engine import Engine
from engine_actor.request import Request
from model.executor import SamplingParams
from model.timed_executor import TimedExecutor
from policies import load_policy

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_policy_admits_short_prompts_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = README.read_text().partition("## Choose who goes next")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(code.splitlines()) <= 10
    (tmp_path / "my_policy.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_policy", raising=False)

    (name,) = re.findall(r"`policy: (my_policy:\w+)`", section)
    engine = Engine(TimedExecutor(1, 64), load_policy(name))
    for length in (5, 2, 9, 3):
        engine.submit(Request(f"{length}", [1] * length, SamplingParams(max_tokens=1), arrival=-length))
    admitted: list[str] = []
    while engine.has_work():
        admitted += engine.step()[1].admitted
    assert admitted == ["2", "3", "5", "9"]
