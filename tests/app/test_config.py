"""Settings: what reaches the engine, and a README that says the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.config import API_KEYS_VARIABLE, Settings, settings_table

REPO = Path(__file__).parent.parent.parent


def test_weights_of_keys_reach_the_fair_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"k1": {"tenant": "a", "weight": 3}, "k2": {"tenant": "b"}}
    monkeypatch.setenv(API_KEYS_VARIABLE, json.dumps(keys))
    config = Settings(policy="fair", policy_settings={"tenant_weights": {"c": 2}}).engine_config()
    assert config.policy_settings == {"tenant_weights": {"a": 3, "b": 1, "c": 2}}
    assert Settings(policy="fcfs").engine_config().policy_settings == {}


def test_the_readme_has_the_settings_table() -> None:
    readme = (REPO / "README.md").read_text()
    table = readme.partition("<!-- settings:begin -->")[2].partition("<!-- settings:end -->")[0]
    assert table.strip() == settings_table().strip(), "paste the output of `python -m app.config`"
