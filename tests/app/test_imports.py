"""What is not the engine's process stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.origin import REPO

ASK = "import sys, {module}; print([name for name in ('torch', 'numba') if name in sys.modules])"


@pytest.mark.parametrize("module", ["app.__main__", "app.ingress", "engine_actor.supervisor"])
def test_replicas_supervisor_and_launcher_load_no_torch_and_no_numba(module: str) -> None:
    command = [sys.executable, "-c", ASK.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=120)
    assert done.stdout == "[]\n", done.stderr
