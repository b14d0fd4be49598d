"""What crosses the border between replicas, supervisor and engine actors. Light to import."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from engine_actor.request import Output

LEASE_SECONDS = 10.0
"""A replica not heard from for so long is gone, and its requests with it; an engine likewise."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What builds one engine; app/config.py says what each setting means. None: chosen by the model."""

    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    threads: int = 0
    max_num_seqs: int = 16
    max_len: int = 2048
    gpu_memory_fraction: float = 0.9
    kv_budget_tokens: int | None = None
    mode: Literal["separate", "batched", "chunked"] = "chunked"
    max_step_tokens: int | None = None
    itl_target: float | None = None
    prefix_reuse: Literal["tenant", "all", "off"] = "tenant"
    policy: str = "fcfs"
    policy_settings: dict[str, Any] = field(default_factory=dict)
    max_waiting: int = 1024
    stall_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """What an engine tells about its steps, and where."""

    run_dir: str = "run"
    version: str = ""
    tracing: bool = True
    trace_all_steps: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    """What the metric `slotserve_engine_info` says."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine turned out to be, told once."""

    summary: str
    """One line for people: model, exactness, slots, memory, threads, policy."""
    vocab_size: int
    max_len: int
    largest_request: int
    """Most tokens (prompt + max_tokens) one request may need."""
    exact: bool
    fingerprint: str
    """What outputs depend on, besides prompt, parameters and seed: weights and how they compute here."""
    slots: int
    mode: str
    policy: str
    eos_token_ids: frozenset[int] = frozenset()
    """Tokens that end a sequence by the model's own files; the tokenizer's may name others."""
    pid: int = field(default_factory=os.getpid)
    """Of the engine's process; it changes when the engine is started again."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How busy an engine is."""

    steps: int = 0
    waiting: int = 0
    running: int = 0
    free_kv: int = 0
    """KV budget less the tokens of everything running or waiting; negative when more waits than fits."""
    stalled: float = 0.0
    """Seconds since the last forward ended while there is work; 0 when idle."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What one step has to say to one replica: all of its requests' outputs in one message."""

    status: EngineStatus
    outputs: tuple[Output, ...] = ()
    attached: bool = False
    """The first frame of an attachment: the engine has nothing of this replica's."""


class EngineFailedError(RuntimeError):
    """An engine could not be built; the message says what its model or settings lack."""
