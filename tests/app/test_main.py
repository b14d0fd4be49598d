"""`python -m app` says what is wrong in one sentence, before Ray starts."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def refusal(directory: Path, text: str) -> str:
    config = directory / "config.yaml"
    config.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "app", "--config", str(config)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("applications: [{args: {max_num_seqs: 0, speed: 9}}]", "max_num_seqs: .* speed: "),
        ("applications: [{args: {policy: fifo}}]", "unknown policy 'fifo'; there are fcfs, "),
        ("applications: [{args: {model: /nowhere}}]", "no model at /nowhere"),
        ("applications: [{args: {dtype: bfloat16}}]", "CPU kernels compute in float32"),
        ("applications: [{}]\nhttp_options: {port: 99999}", "not a port number"),
        ("settings: {}", "applications"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU refuses")
def test_a_bad_configuration_is_refused_in_a_sentence(tmp_path: Path, text: str, reason: str) -> None:
    assert re.search(reason, refusal(tmp_path, text))


def test_a_taken_port_is_refused_before_another_server_answers(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        text = f"applications: [{{}}]\nhttp_options: {{port: {port}}}"
        assert f"127.0.0.1:{port}" in refusal(tmp_path, text)
