"""Settings are validated, their keys stay secret, and the README lists them all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from app.config import API_KEYS_VARIABLE, Settings, Tenant, settings_table
from tests.serving import ROOT

BEGIN, END = "<!-- settings:begin -->", "<!-- settings:end -->"


def test_the_file_that_is_served_is_valid() -> None:
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    (application,) = config["applications"]
    Settings.model_validate(application["args"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_seq": 16},
        {"max_num_seqs": 0},
        {"mode": "magic"},
        {"device": "tpu"},
        {"max_body_bytes": 1023},
        {"max_n": 129},
        {"num_engines": "many"},
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Settings.model_validate(wrong)


def test_every_setting_is_described_and_in_the_readme() -> None:
    table = settings_table()
    for name, field in Settings.model_fields.items():
        assert field.description
        assert f"| `{name}` |" in table
    readme = (ROOT / "README.md").read_text()
    assert readme.split(BEGIN)[1].split(END)[0].strip() == table, "paste the output of `python -m app.config`"


def test_relative_paths_hold_wherever_the_workers_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(model="m.gguf", run_dir="r")
    assert settings.model == str(tmp_path / "m.gguf")
    assert settings.run_dir == str(tmp_path / "r")
    assert Settings().run_dir == str(tmp_path / "run")


def test_keys_come_from_the_file_and_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"k1": {"tenant": "alice", "weight": 2}}))
    monkeypatch.setenv(API_KEYS_VARIABLE, json.dumps({"k2": {"tenant": "bob"}}))
    assert Settings(api_keys_file=str(file)).api_keys() == {
        "k1": Tenant(tenant="alice", weight=2),
        "k2": Tenant(tenant="bob", weight=1),
    }


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"sk-secret": "alice"}',
        '{"sk-secret": {"tenant": "a b"}}',
        '{" sk-secret": {"tenant": "a"}}',
        '{"sk-secret": {"tenant": "a"}, "": {"tenant": "b"}}',
    ],
)
def test_broken_keys_are_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "keys.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"keys\.json") as refused:
        Settings(api_keys_file=str(file)).api_keys()
    assert "sk-secret" not in str(refused.value)
    with pytest.raises(ValueError, match="cannot read"):
        Settings(api_keys_file=str(tmp_path / "absent.json")).api_keys()


def test_a_source_without_keys_does_not_open_the_server_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEYS_VARIABLE, "{}")
    with pytest.raises(ValueError, match=f"{API_KEYS_VARIABLE} names no key"):
        Settings().api_keys()


def test_weights_of_keys_reach_the_fair_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"k1": {"tenant": "a", "weight": 3}, "k2": {"tenant": "b"}}
    monkeypatch.setenv(API_KEYS_VARIABLE, json.dumps(keys))
    config = Settings(policy="fair", policy_settings={"tenant_weights": {"c": 2}}).engine_config()
    assert config.policy_settings == {"tenant_weights": {"a": 3, "b": 1, "c": 2}}
    assert Settings(policy="fcfs").engine_config().policy_settings == {}


def test_a_full_batch_of_decodes_leaves_room_for_a_prompt() -> None:
    Settings(max_num_seqs=16, max_step_tokens=17)
    Settings(max_num_seqs=16, max_step_tokens=16, mode="batched")
    with pytest.raises(ValidationError, match="must exceed max_num_seqs"):
        Settings(max_num_seqs=16, max_step_tokens=16)
