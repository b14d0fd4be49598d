"""One engine as a replica knows it: how busy, since when silent, what is under way there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from app.engine_port import Engine
from app.flight import Flight
from engine_actor.messages import LEASE_SECONDS, EngineInfo, EngineStatus


@dataclass(eq=False)
class Connection:
    """One engine as this replica knows it."""

    index: int
    name: str = ""
    engine: Engine | None = None
    info: EngineInfo | None = None
    status: EngineStatus = field(default_factory=EngineStatus)
    stream: int = 0
    """Number of the stream of frames that is read now, unlike that of any other."""
    attachments: int = 0
    """How often the engine has said that it has nothing of this replica's."""
    flights: dict[str, Flight] = field(default_factory=dict)
    promised: int = 0
    """Tokens placed here since the engine last said how busy it is."""
    heard: float = 0.0
    """When it last said anything."""

    def hear(self, status: EngineStatus) -> None:
        self.status = status
        self.heard = time.monotonic()

    @property
    def slots(self) -> int:
        return 0 if self.info is None else self.info.slots

    @property
    def fingerprint(self) -> str | None:
        return None if self.info is None else self.info.fingerprint

    @property
    def waiting(self) -> int:
        return self.status.waiting

    @property
    def free_kv(self) -> int:
        """As it last said, less what was placed there since."""
        return self.status.free_kv - self.promised

    @property
    def held(self) -> int:
        """Requests that run or wait there, or are on their way from here, as far as is known."""
        return max(self.status.running + self.status.waiting, len(self.flights))

    @property
    def silent(self) -> float:
        """Seconds without a word beyond what is usual: a frozen process or a lost network."""
        quiet = time.monotonic() - self.heard
        return quiet if quiet > LEASE_SECONDS else 0.0
