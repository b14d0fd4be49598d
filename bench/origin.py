"""Where a figure comes from: command, commit, machine, date."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPO = Path(__file__).parent.parent


def origin() -> dict[str, Any]:
    """Of what runs now. A commit whose tree has been changed says so."""
    command = Path(sys.argv[0])
    program = f"python -m {command.parent.name}" if command.name == "__main__.py" else command.name
    return {
        "command": shlex.join([*program.split(), *sys.argv[1:]]),
        "commit": _git("rev-parse", "--short", "HEAD")
        + ("+changes" if _git("status", "--porcelain") else ""),
        "machine": machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine() -> dict[str, Any]:
    import torch

    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    named = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": named[0] if named else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(memory / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": version("ray"),
    }


def _git(*arguments: str) -> str:
    with suppress(FileNotFoundError):
        return subprocess.run(
            ["git", "-C", str(REPO), *arguments], capture_output=True, text=True
        ).stdout.strip()
    return ""
