"""Every setting, in one validated model: the `args` of serve_config.yaml fill it.

`python -m app.config` prints the README's settings table, generated from the descriptions here.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from engine_actor.messages import EngineConfig, TelemetryConfig

API_KEYS_VARIABLE = "SLOTSERVE_API_KEYS"

TenantName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Tenant(BaseModel):
    """Who a key belongs to, and how much service that tenant weighs under the fair policy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant: TenantName
    weight: float = Field(1.0, gt=0)


class Settings(BaseModel):
    """What `serve_config.yaml` may set. An unknown or invalid setting stops the deployment."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), validate_default=True)

    model: str | None = Field(
        None, description="A .gguf file or a Hugging Face directory; empty: the packaged SmolLM2-135M."
    )
    model_name: str | None = Field(
        None, description="The name clients ask for; empty: the name of the file or directory."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; `auto`: the GPU if Ray has one."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="What it computes in; `auto`: float32 on a CPU, bfloat16 on a GPU."
    )
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads of one engine; 0: all cores, shared between the engines."
    )
    max_num_seqs: int = Field(16, ge=1, le=4096, description="Slots: requests that run at once, per engine.")
    max_len: int = Field(
        2048,
        ge=2,
        description="Longest prompt + output in tokens (vLLM: `max_model_len`), capped by "
        "the model's context.",
    )
    gpu_memory_fraction: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Of a GPU's memory, what weights, steps and slots may fill; fewer slots than "
        "`max_num_seqs` if no more fit.",
    )
    kv_budget_tokens: int | None = Field(
        None, ge=2, description="Most tokens cached over all slots of an engine; empty: the whole pool."
    )
    mode: Literal["separate", "batched", "chunked"] = Field(
        "chunked",
        description="How prompts are prefilled: one by one, together, or in chunks beside the decodes.",
    )
    max_step_tokens: int | None = Field(
        None,
        ge=2,
        description="Rows of one step in mode `chunked` (vLLM: `max_num_batched_tokens`): the decodes first, "
        "prompts get the rest; empty: as many as `itl_target_ms` allows.",
    )
    itl_target_ms: float | None = Field(
        None,
        gt=0,
        description="How long a step may take while somebody decodes, by what steps took so far; empty: "
        "1.8 steps of a full batch, longer while requests wait for a slot.",
    )
    prefix_reuse: Literal["tenant", "all", "off"] = Field(
        "tenant",
        description="Whose computed beginnings of prompts a request may reuse: its tenant's, everybody's, "
        "nobody's. The answer is the same, bit for bit.",
    )
    policy: str = Field(
        "fcfs",
        description="Who is next: `fcfs`, `priority`, `fair`, `static`, or your own `package.module:Class`.",
    )
    policy_settings: dict[str, Any] = Field(
        default_factory=dict, description="Keyword settings of the policy, such as `aging_seconds: 30`."
    )
    num_engines: int = Field(1, ge=1, le=256, description="Engine actors, each with its own model.")
    num_replicas: int = Field(1, ge=1, le=256, description="HTTP replicas: they tokenize and stream.")
    max_waiting: int = Field(
        1024, ge=1, description="Requests that may wait for a slot, per engine; beyond it: HTTP 429."
    )
    max_body_bytes: int = Field(1_048_576, ge=1024, description="Largest request body; beyond it: HTTP 413.")
    generation_config: bool = Field(
        True,
        description="Where a request does not say, sample as the model's generation_config.json does "
        "(temperature, top_p, top_k, min_p, repetition_penalty); `false`: as OpenAI's defaults do.",
    )
    special_tokens_in_prompts: bool = Field(
        True,
        description="Special tokens written out in a prompt of `/v1/completions` are special; `false`: they "
        "are text, as they always are in messages.",
    )
    max_n: int = Field(16, ge=1, le=128, description="Largest `n`: choices per prompt.")
    max_prompts: int = Field(64, ge=1, le=2048, description="Most prompts in one completions request.")
    max_tenants: int = Field(
        256, ge=1, description="Tenant names told apart without keys; later ones share the name `other`."
    )
    api_keys_file: str | None = Field(
        None,
        description='JSON file `{"<key>": {"tenant": "<name>", "weight": 1}}`; the environment variable '
        f"`{API_KEYS_VARIABLE}` holds the same JSON. With keys, every request needs one.",
    )
    cors_origins: list[str] = Field(
        default_factory=list,
        description="Origins of web pages that may ask from a browser, such as `https://chat.example.org`; "
        "`*`: any. Pages of this machine always may.",
    )
    keep_alive_seconds: float = Field(
        10,
        gt=0,
        description="While a stream has nothing to say, it says so this often: proxies cut silent streams.",
    )
    stall_seconds: float = Field(
        60,
        gt=0,
        description="If work waits and no forward has ended for so long, `/health` turns 503 and the engine "
        "is started again; its requests go on.",
    )
    tracing: bool = Field(
        True,
        description="Record spans, to files under `run_dir` or where OpenTelemetry's variables say.",
    )
    trace_all_steps: bool = Field(
        False, description="Link a request's spans to every step it rode in, not only to the telling ones."
    )
    trace_prompts: bool = Field(False, description="Put prompts into traces. Off: no text ever is.")
    run_dir: str = Field("run", description="Where traces and cached tokenizers are written.")

    @model_validator(mode="after")
    def _room_for_prompts(self) -> Settings:
        rows = self.max_step_tokens
        if self.mode == "chunked" and rows is not None and rows <= self.max_num_seqs:
            raise ValueError(
                f"max_step_tokens ({rows}) must exceed max_num_seqs ({self.max_num_seqs}): "
                "a full batch of decodes would leave no room for any prompt"
            )
        return self

    @field_validator("model", "api_keys_file", "run_dir")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        # Ray's workers may run in another directory than the one the file was written for.
        return None if path is None else str(Path(path).expanduser().absolute())

    def api_keys(self) -> dict[str, Tenant]:
        """Keys to tenants, from the file and the environment. Raises ValueError naming the culprit."""
        sources: dict[str, str] = {}
        if self.api_keys_file:
            try:
                sources[self.api_keys_file] = Path(self.api_keys_file).read_text()
            except OSError as error:
                raise ValueError(
                    f"cannot read api_keys_file {self.api_keys_file}: {error.strerror}"
                ) from None
        if API_KEYS_VARIABLE in os.environ:
            sources[API_KEYS_VARIABLE] = os.environ[API_KEYS_VARIABLE]
        keys: dict[str, Tenant] = {}
        for origin, text in sources.items():
            try:
                found = {key: Tenant.model_validate(value) for key, value in json.loads(text).items()}
            except (ValueError, AttributeError):
                # The text holds secrets: the error names the source and never quotes it.
                raise ValueError(f"{origin} is not a JSON object of keys to tenants") from None
            if not found:
                # No keys would mean that nobody needs one.
                raise ValueError(f"{origin} names no key: name one, or remove it to serve without keys")
            if any(not key or key != key.strip() for key in found):
                raise ValueError(
                    f"{origin} has a key that no request can send: empty, or with space around it"
                )
            keys |= found
        return keys

    def engine_config(self) -> EngineConfig:
        """What one engine actor needs to know."""
        return EngineConfig(
            model=self.model,
            device=None if self.device == "auto" else self.device,
            dtype=None if self.dtype == "auto" else self.dtype,
            threads=self.threads,
            max_num_seqs=self.max_num_seqs,
            max_len=self.max_len,
            gpu_memory_fraction=self.gpu_memory_fraction,
            kv_budget_tokens=self.kv_budget_tokens,
            mode=self.mode,
            max_step_tokens=self.max_step_tokens,
            itl_target=None if self.itl_target_ms is None else self.itl_target_ms / 1000,
            prefix_reuse=self.prefix_reuse,
            policy=self.policy,
            policy_settings=self._weighted() if self.policy == "fair" else self.policy_settings,
            max_waiting=self.max_waiting,
            stall_seconds=self.stall_seconds,
        )

    def _weighted(self) -> dict[str, Any]:
        """The fair policy's settings, with the weights that came with the keys."""
        by_key = {who.tenant: who.weight for who in self.api_keys().values()}
        weights = by_key | self.policy_settings.get("tenant_weights", {})
        return {**self.policy_settings, "tenant_weights": weights}

    def telemetry_config(self, model_name: str) -> TelemetryConfig:
        """What engines and replicas tell about themselves, and where."""
        return TelemetryConfig(
            run_dir=self.run_dir,
            version=_version(),
            tracing=self.tracing,
            trace_all_steps=self.trace_all_steps,
            labels={"model": model_name, "mode": self.mode, "policy": self.policy},
        )


def _version() -> str:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    version: str = project["project"]["version"]
    return version


def settings_table() -> str:
    """The settings as a Markdown table."""
    lines = ["| setting | default | what it does |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "" if default is None else f"`{json.dumps(default)}`"
        lines.append(f"| `{name}` | {shown} | {field.description} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(settings_table())
