"""What requests may say: OpenAI's fields, with vLLM's names for what OpenAI lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from app.api_error import invalid
from model.executor import MAX_LOGPROBS, SamplingParams

FIELD_ERROR = "field_error"

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_LOGIT_BIAS = 300
MAX_TOKEN_DIGITS = 1000
"""In a key of `logit_bias`; Python refuses to read numbers of more than 4,300."""
MAX_STOP_TOKEN_IDS = 128
MAX_USER_LENGTH = 256
MAX_MESSAGES = 2048

ShortText = Annotated[str, Field(max_length=MAX_USER_LENGTH)]
TokenId = Annotated[int, Field(ge=0)]


class Schema(BaseModel):
    """What a client sends. A null says as much as nothing; a field that is not known here is set aside."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        return _present(data)


def _present(data: object) -> object:
    if isinstance(data, dict):
        return {key: _present(value) for key, value in data.items() if value is not None}
    return data


def _wrong(field: str, reason: str) -> PydanticCustomError:
    """The error of a check that looks at several fields, laid at the door of one."""
    return PydanticCustomError(FIELD_ERROR, "{reason}", {"field": field, "reason": reason})


class StreamOptions(Schema):
    """What a stream tells besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class _Generate(Schema):
    """What both endpoints share."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of `max_tokens`, and the one that counts where both are given."""
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    """0 is greedy: no token but the likeliest is within it."""
    n: int = Field(1, ge=1)
    stop: list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    user: ShortText | None = None

    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=10)
    """Not nearer to 0: logits divided by it must stay finite."""
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_STOP_TOKEN_IDS)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, max_length=256)
    """Only requests of the same salt share computed prefixes (vLLM's field)."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include_preemptions: bool = False
    """Adds `num_preemptions` to `usage.completion_tokens_details`."""

    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: ShortText | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_strings(cls, stop: object) -> object:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
            raise ValueError("must be a string or a list of strings")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"may hold {MAX_STOPS} strings at most, got {len(stops)}")
        if any(len(text) > MAX_STOP_LENGTH for text in stops):
            raise ValueError(f"a stop string may have {MAX_STOP_LENGTH} characters at most")
        # The empty string is how some clients say "none".
        return [text for text in stops if text]

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token, value in (bias or {}).items():
            if not (token.isascii() and token.isdigit() and len(token) <= MAX_TOKEN_DIGITS):
                raise ValueError(f"{token[:40]!r} is not a token id")
            if not -100 <= value <= 100:
                raise ValueError(f"a bias lies between -100 and 100, got {value} for token {token}")
        if bias and len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"may name {MAX_LOGIT_BIAS} tokens at most, got {len(bias)}")
        return bias

    @model_validator(mode="after")
    def _stream_only(self) -> _Generate:
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options", "only allowed when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise _wrong("prompt_logprobs", "not available when stream is true")
        return self

    def with_defaults(self, defaults: Mapping[str, float]) -> Self:
        """This request, saying `defaults` where it said nothing."""
        return self.model_copy(
            update={name: value for name, value in defaults.items() if name not in self.model_fields_set}
        )

    @property
    def stops(self) -> list[str]:
        return self.stop or []

    @property
    def width(self) -> int:
        """Sequences that each prompt is answered with, shown or not."""
        return self.n

    def sampling(
        self,
        *,
        vocab_size: int,
        max_tokens: int,
        seed: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """Engine parameters. Raises ApiError for token ids outside the vocabulary."""
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        for name, ids in (("logit_bias", bias), ("stop_token_ids", self.stop_token_ids)):
            check_vocabulary(ids, vocab_size, name)
        if self.min_tokens > max_tokens:
            raise invalid(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({max_tokens})", "min_tokens"
            )
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature if self.top_p else 0.0,
            top_k=max(self.top_k, 0),
            top_p=self.top_p or 1.0,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=bias,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids),
            seed=seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Message(Schema):
    """One turn: a role and text, given as a string or as text parts."""

    role: str
    content: str | None = None
    name: ShortText | None = None

    @field_validator("role")
    @classmethod
    def _known_role(cls, role: str) -> str:
        if role in ("tool", "function"):
            raise ValueError(f"role {role!r} is not supported: this server runs no tools")
        if role not in _ROLES:
            raise ValueError(f"must be one of {', '.join(_ROLES)}, got {role!r}")
        return role

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, content: object) -> object:
        if not isinstance(content, list):
            return content
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"only parts of type 'text' are supported, got {kind!r}")
            texts.append(part["text"])
        return "\n".join(texts)

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise _wrong("content", f"a message of the role {self.role!r} needs one")
        return self

    def as_template_input(self) -> dict[str, str]:
        """What chat templates expect."""
        return {"role": _ROLES[self.role], "content": self.content or ""}


class Conversation(Schema):
    """Messages, and how the chat template writes them."""

    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: bool | None = None
    """Write the beginning of the assistant's turn; default: unless its last message is to be continued."""
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template."""

    @model_validator(mode="after")
    def _one_ending(self) -> Conversation:
        if self.continue_final_message and self.add_generation_prompt:
            raise _wrong("continue_final_message", "cannot be true together with add_generation_prompt")
        if self.continue_final_message and self.messages and self.messages[-1].role != "assistant":
            raise _wrong("continue_final_message", "the last message must be the assistant's")
        return self


class ChatRequest(_Generate, Conversation):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    store: Literal[False] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _supported(self) -> ChatRequest:
        if self.response_format is not None and self.response_format.get("type") not in (None, "text"):
            kind = self.response_format.get("type")
            raise _wrong("response_format", f"type {kind!r} is not supported, only 'text'")
        if self.modalities not in (None, ["text"]):
            raise _wrong("modalities", "only ['text'] is supported")
        if self.top_logprobs is not None and not self.logprobs:
            raise _wrong("top_logprobs", "needs logprobs to be true")
        if self.max_tokens == 0:
            raise _wrong("max_tokens", "must be at least 1")
        return self

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Generate):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Sequences to generate; those `n` whose tokens are the likeliest on average are returned."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _known_shape(cls, prompt: object) -> object:
        if isinstance(prompt, str):
            return prompt
        if not isinstance(prompt, list) or not prompt:
            raise ValueError("must be a string, a list of strings, token ids or a list of token-id lists")
        if all(isinstance(item, str) for item in prompt) or _is_ids(prompt):
            return prompt
        if all(isinstance(item, list) and _is_ids(item) for item in prompt):
            return prompt
        raise ValueError("must be a string, a list of strings, token ids or a list of token-id lists")

    @model_validator(mode="after")
    def _supported(self) -> CompletionRequest:
        if self.suffix:
            raise _wrong("suffix", "not supported")
        if self.best_of is not None and self.best_of < self.n:
            raise _wrong("best_of", f"must not be less than n, which is {self.n}")
        if self.stream and self.width > self.n:
            raise _wrong("best_of", "which answers are best is known at their end: not with stream")
        if self.max_tokens == 0 and not self.echo:
            raise _wrong("max_tokens", "must be at least 1, unless echo is true")
        return self

    @property
    def width(self) -> int:
        """See _Generate."""
        return self.best_of or self.n

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt on its own: text, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TokenizeRequest(Conversation):
    """POST /tokenize: text, or a conversation as the chat template would write it."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise _wrong("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(Schema):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


def check_vocabulary(ids: Sequence[int] | dict[int, float], vocab_size: int, param: str) -> None:
    """Raises ApiError for a token id that the model does not have."""
    worst = max(ids, default=0)
    if worst >= vocab_size:
        raise invalid(
            f"Invalid '{param}': token id {worst} is not below the vocabulary size {vocab_size}", param
        )


def _is_ids(items: Sequence[Any]) -> bool:
    return bool(items) and all(type(item) is int and item >= 0 for item in items)
