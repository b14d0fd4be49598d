"""HAProxy's environment: nothing in it may be another server's, and nothing of it the network's."""

from __future__ import annotations

import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from app.haproxy import haproxy


def own(directory: Path) -> set[str]:
    """The ports and paths of a server whose files lie in `directory`."""
    directory.mkdir()
    return {
        value
        for name, value in haproxy(str(directory)).items()
        if (name.endswith("_PORT") and "_MAX_" not in name) or str(directory) in value
    }


def test_two_servers_of_one_machine_share_neither_port_nor_file(tmp_path: Path) -> None:
    ours = own(tmp_path / "ours")
    with ExitStack() as listening:
        for port in filter(str.isdigit, ours):
            listener = listening.enter_context(socket.socket())
            listener.bind(("127.0.0.1", int(port)))
            listener.listen()
        theirs = own(tmp_path / "theirs")
    assert len(ours) == len(theirs) == 11
    assert not ours & theirs


def test_what_haproxy_tells_about_itself_is_told_on_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "it's haproxy"
    binary.write_text('#!/bin/sh\necho "$@"\n')
    binary.chmod(0o755)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(binary))
    environment = haproxy(str(tmp_path))
    config = HAPROXY_CONFIG_TEMPLATE
    for name in ("stats", "metrics"):
        port = environment[f"RAY_SERVE_HAPROXY_{name.upper()}_PORT"]
        config = config.replace(f"{{{{ config.{name}_port }}}}", port)
    file = tmp_path / "node" / "haproxy.cfg"
    file.parent.mkdir()
    file.write_text(config)
    command = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(file), "-sf", "7 8"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"-db -f {file} -sf 7 8\n"
    assert done.stderr == ""
    changed = set(file.read_text().splitlines()) - set(config.splitlines())
    assert changed == {
        f"    bind 127.0.0.1:{environment['RAY_SERVE_HAPROXY_METRICS_PORT']}",
        f"  bind 127.0.0.1:{environment['RAY_SERVE_HAPROXY_STATS_PORT']}",
    }
    assert len(file.read_text().splitlines()) == len(config.splitlines())


def test_without_a_haproxy_ray_is_left_to_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "absent"))
    assert "RAY_SERVE_HAPROXY_BINARY_PATH" not in haproxy(str(tmp_path))
