"""One clock for everything that is measured, and how it is shown.

Durations must not jump when somebody sets the time of day, so everything is counted in `time.monotonic`,
which all processes of one machine share. Wall time is for people: traces, the live page.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


BOOT = _boot()


_EPOCH = time.time() - time.monotonic()


def wall(monotonic: float) -> float:
    """The time of day (seconds since 1970) at a moment of `time.monotonic`, as this process first saw it."""
    return _EPOCH + monotonic


@dataclass(frozen=True, slots=True)
class Sent:
    """When a message left, by its machine's clock."""

    at: float = field(default_factory=time.monotonic)
    boot: str = BOOT

    def ahead(self) -> float:
        """Seconds to add to the sender's times to have this machine's: 0 on the same machine.

        From another one the message counts as having taken no time.
        """
        return 0.0 if self.boot == BOOT else time.monotonic() - self.at


class VirtualClock:
    """A clock that stands still until it is told to go on: `TimedExecutor(..., wait=clock.advance)`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now += seconds
