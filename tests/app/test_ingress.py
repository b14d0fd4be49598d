"""Every route and every refusal, over a toy engine in this process, through the official client."""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import zstandard

from app.body import ZSTD_WINDOW
from app.config import Settings
from app.engine_client import EngineClient
from app.ingress import create_app
from app.parsing import NAME_LENGTH, REMEMBERED_NAMES, SHOWN_NAMES
from app.refusals import Refusals
from app.schemas import MAX_LOGIT_BIAS, MAX_STOP_LENGTH, MAX_STOPS, MAX_USER_LENGTH
from app.service import Service
from app.tenants import Tenants, digest
from app.tokenizer import Tokenizer
from model.files import find_model
from tests.app.engines import POISON, READS, LocalDirectory, build_toy
from tests.fakes import VOCAB

MODEL = "toy"
HELLO: Any = [{"role": "user", "content": "Hello"}]
MAX_LEN = 128


@dataclass
class Site:
    """The application in this process: HTTP without a socket, and the official client on it."""

    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    directory: LocalDirectory
    client: EngineClient
    app: Any

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def refused(self, path: str, status: int, param: str | None, **body: Any) -> dict[str, Any]:
        response = await self.post(path, **body)
        assert response.status_code == status, response.text
        error: dict[str, Any] = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param
        return error


@asynccontextmanager
async def site(
    tokenizer: Tokenizer,
    keys: dict[str, str] | None = None,
    *,
    seconds: float = 0.0,
    kv_budget: int | None = None,
    max_waiting: int = 100,
    **settings: Any,
) -> AsyncIterator[Site]:
    directory = LocalDirectory(build_toy(seconds=seconds, max_len=MAX_LEN, kv_budget=kv_budget), max_waiting)
    known = Settings(model_name=MODEL, max_waiting=max_waiting, **settings)
    client = EngineClient("replica", known.num_engines, directory, max_waiting)
    await client.start()
    app = create_app(
        Service(known, tokenizer, client, Tenants(keys or {}, known.max_tenants), Refusals(directory))
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as http:
            transport_of_a_fork: Any = http  # the official client names a fork of httpx as its type
            official = openai.AsyncOpenAI(
                base_url="http://toy/v1", api_key="k", http_client=transport_of_a_fork, max_retries=0
            )
            yield Site(http, official, directory, client, app)
    finally:
        await client.stop()
        directory.stop()


def scenario(work: Callable[[Site], Awaitable[None]], tokenizer: Tokenizer, **options: Any) -> None:
    async def main() -> None:
        async with site(tokenizer, **options) as running:
            await work(running)

    asyncio.run(asyncio.wait_for(main(), 60))


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_chat_answer_has_openais_shape_streamed_or_not(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        options: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 9, "seed": 3}
        whole = (await s.post("/v1/chat/completions", **options)).json()
        assert whole["id"].startswith("chatcmpl-")
        assert whole["object"] == "chat.completion"
        assert whole["system_fingerprint"] == "fp_toy"
        choice = whole["choices"][0]
        assert choice["message"] == {
            "role": "assistant",
            "content": choice["message"]["content"],
            "refusal": None,
            "annotations": [],
        }
        assert choice["finish_reason"] in ("length", "stop")
        usage = whole["usage"]
        assert usage["prompt_tokens"] == len(tokenizer.encode_chat(HELLO))
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

        streamed = events(
            await s.post(
                "/v1/chat/completions", **options, stream=True, stream_options={"include_usage": True}
            )
        )
        first, *middle, final, last = streamed
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle)
        assert text == choice["message"]["content"]
        assert final["choices"][0] | {"finish_reason": 0} == {
            "index": 0,
            "delta": {},
            "logprobs": None,
            "finish_reason": 0,
        }
        assert final["choices"][0]["finish_reason"] == choice["finish_reason"]
        assert all(chunk["usage"] is None for chunk in streamed[:-1])
        assert last["choices"] == []
        # What the second finds computed is no part of the answer.
        assert last["usage"] | {"prompt_tokens_details": usage["prompt_tokens_details"]} == usage
        assert {(c["id"], c["object"], c["created"], c["model"]) for c in streamed} == {
            (first["id"], "chat.completion.chunk", first["created"], MODEL)
        }

        plain = events(await s.post("/v1/chat/completions", **options, stream=True))
        assert not any("usage" in chunk for chunk in plain)
        counting = events(
            await s.post(
                "/v1/chat/completions",
                **options,
                stream=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True},
            )
        )
        counts = [chunk["usage"]["completion_tokens"] for chunk in counting]
        assert counts == sorted(counts)
        assert counts[0] == 0
        assert counts[-1] == usage["completion_tokens"]

    scenario(work, tokenizer)


def test_the_official_client_reads_both_endpoints(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        chat = await s.openai.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_completion_tokens=6,
            seed=1,
            logprobs=True,
            top_logprobs=3,
        )
        assert chat.choices[0].logprobs is not None
        content = chat.choices[0].logprobs.content or []
        assert b"".join(bytes(token.bytes or []) for token in content).decode(errors="replace") == (
            chat.choices[0].message.content
        )
        assert all(len(token.top_logprobs) == 3 for token in content)
        completion = await s.openai.completions.create(
            model=MODEL, prompt="Once", max_tokens=6, seed=1, logprobs=2, echo=True
        )
        choice = completion.choices[0]
        assert completion.id.startswith("cmpl-")
        assert choice.text.startswith("Once")
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.text_offset is not None
        tokens = choice.logprobs.tokens or []
        for token, offset in zip(tokens, choice.logprobs.text_offset, strict=True):
            assert token.startswith("bytes:") or choice.text[offset:].startswith(token)
        models = [model.id async for model in s.openai.models.list()]
        assert models == [MODEL]
        assert (await s.openai.models.retrieve(MODEL)).id == MODEL
        files = find_model()
        assert (await s.openai.models.retrieve(MODEL)).created == int(
            (files.dir / (files.gguf_file or "config.json")).stat().st_mtime
        )
        with pytest.raises(openai.NotFoundError):
            await s.openai.models.retrieve("gpt-4")

    scenario(work, tokenizer)


def test_a_conversation_goes_on_with_the_answer_as_it_came(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        options: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "seed": 1}
        answer = (await s.openai.chat.completions.create(messages=HELLO, **options)).choices[0].message
        again = [{"role": "user", "content": "And then?"}]
        turns: Any = [*HELLO, answer, *again]
        second = await s.openai.chat.completions.create(messages=turns, **options)
        plain: Any = [*HELLO, {"role": "assistant", "content": answer.content}, *again]
        same = await s.openai.chat.completions.create(messages=plain, **options)
        assert second.choices[0].message.content == same.choices[0].message.content
        empty = [{**HELLO[0], "audio": None, "tool_calls": [], "function_call": None}]
        assert (await s.post("/v1/chat/completions", messages=empty, max_tokens=1)).status_code == 200

    scenario(work, tokenizer)


def test_completions_take_all_four_forms_of_prompt(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        texts = ["One day", "Two"]
        ids = [tokenizer.encode(text) for text in texts]
        small = [[token % VOCAB for token in prompt] for prompt in ids]
        options = {"temperature": 0, "max_tokens": 5}
        both = (await s.post("/v1/completions", prompt=texts, **options)).json()
        assert [choice["index"] for choice in both["choices"]] == [0, 1]
        assert both["usage"]["prompt_tokens"] == sum(map(len, ids))
        single = (await s.post("/v1/completions", prompt=texts[1], **options)).json()
        assert single["choices"][0]["text"] == both["choices"][1]["text"]
        by_ids = (await s.post("/v1/completions", prompt=small, **options)).json()
        one = (await s.post("/v1/completions", prompt=small[0], **options)).json()
        assert one["choices"][0]["text"] == by_ids["choices"][0]["text"]
        streamed = events(await s.post("/v1/completions", prompt=texts, **options, stream=True))
        for index in (0, 1):
            text = "".join(c["choices"][0]["text"] for c in streamed if c["choices"][0]["index"] == index)
            assert text == both["choices"][index]["text"]
        assert {c["object"] for c in streamed} == {"text_completion"}

    scenario(work, tokenizer)


def test_echo_alone_scores_a_prompt(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        prompt = [40, 41, 42]
        text = tokenizer.decode(prompt)
        body: dict[str, Any] = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1}
        answer = (await s.post("/v1/completions", **body)).json()
        assert answer["choices"][0]["text"] == text
        assert answer["choices"][0]["logprobs"]["tokens"] == [tokenizer.token_text(t) for t in prompt]
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 0, 3)
        streamed = events(await s.post("/v1/completions", **body, stream=True))
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == text

    scenario(work, tokenizer)


def test_choices_differ_and_seeds_repeat(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        def texts(answer: httpx.Response) -> list[str]:
            return [choice["message"]["content"] for choice in answer.json()["choices"]]

        many = await s.post("/v1/chat/completions", messages=HELLO, n=3, max_tokens=8, seed=11)
        again = await s.post("/v1/chat/completions", messages=HELLO, n=3, max_tokens=8, seed=11)
        single = await s.post("/v1/chat/completions", messages=HELLO, max_tokens=8, seed=11)
        assert texts(many) == texts(again)
        assert len(set(texts(many))) == 3
        assert texts(single) == texts(many)[:1]
        unseeded = [await s.post("/v1/chat/completions", messages=HELLO, max_tokens=8) for _ in range(2)]
        assert texts(unseeded[0]) != texts(unseeded[1])
        streamed = events(
            await s.post("/v1/chat/completions", messages=HELLO, n=3, max_tokens=8, seed=11, stream=True)
        )
        for index in range(3):
            deltas = [c["choices"][0]["delta"] for c in streamed if c["choices"][0]["index"] == index]
            assert "".join(delta.get("content", "") for delta in deltas) == texts(many)[index]

    scenario(work, tokenizer)


def test_equal_prompts_without_a_seed_get_answers_of_their_own(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        async def texts(**options: Any) -> list[str]:
            answer = await s.post("/v1/completions", prompt=["Tell a joke"] * 4, max_tokens=8, **options)
            return [choice["text"] for choice in answer.json()["choices"]]

        assert len(set(await texts())) == 4
        assert len(set(await texts(n=2))) == 8
        assert len(set(await texts(seed=3))) == 1
        assert len(set(await texts(seed=3, n=2))) == 2

    scenario(work, tokenizer)


def test_a_stop_string_ends_the_answer_before_it_and_the_slot_is_free(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        options: dict[str, Any] = {"prompt": "Go", "max_tokens": 40, "seed": 5, "ignore_eos": True}
        full = (await s.post("/v1/completions", **options)).json()["choices"][0]["text"]
        stop = full[7:10]
        for extra in ({}, {"logprobs": 0}):
            cut = (await s.post("/v1/completions", **options, **extra, stop=["\0never", stop])).json()
            assert cut["choices"][0]["text"] == full[: full.index(stop)]
            assert cut["choices"][0]["finish_reason"] == "stop"
            assert cut["usage"]["completion_tokens"] < 40
        streamed = events(await s.post("/v1/completions", **options, stop=stop, stream=True))
        assert "".join(c["choices"][0]["text"] for c in streamed) == full[: full.index(stop)]
        actor = s.directory.engines[0].actor
        async with asyncio.timeout(5):
            while actor._steps.status().running:
                await asyncio.sleep(0.01)
        figures = {f.name: f for f in await actor.figures()}
        ends = {sample.labels["finish_reason"] for sample in figures["slotserve_requests"].samples}
        assert ends == {"length", "stop"}
        assert figures["slotserve_aborts"].samples == []
        unmet = (await s.post("/v1/completions", **options, stop=full[-2:] + "\0")).json()
        assert unmet["choices"][0]["text"] == full
        free = (await s.post("/v1/completions", **options, min_tokens=40)).json()["choices"][0]["text"]
        late = (await s.post("/v1/completions", **options, min_tokens=40, stop=free[7:10])).json()
        assert late["choices"][0]["text"] == free

    scenario(work, tokenizer)


def test_the_models_own_end_tokens_end_an_answer(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        options = {"prompt": [1], "max_tokens": 9, "temperature": 0, "logit_bias": {"5": 100}}
        without = (await s.post("/v1/completions", **options)).json()
        assert without["usage"]["completion_tokens"] == 9
        s.client.info = replace(s.client.info, eos_token_ids=frozenset({5}))
        ended = (await s.post("/v1/completions", **options)).json()
        assert ended["choices"][0]["finish_reason"] == "stop"
        assert ended["usage"]["completion_tokens"] == 1

    scenario(work, tokenizer)


@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_in_a_prompt_are_special_unless_the_settings_say_no(
    tokenizer: Tokenizer, special: bool
) -> None:
    async def work(s: Site) -> None:
        text = "a<|im_end|>"
        asked = (await s.post("/v1/completions", prompt=text, max_tokens=1)).json()
        tokens = tokenizer.encode(text, parse_special=special)
        assert (2 in tokens) is special
        assert asked["usage"]["prompt_tokens"] == len(tokens)
        assert (await s.post("/tokenize", prompt=text)).json()["tokens"] == tokens
        chat = (await s.post("/tokenize", messages=[{"role": "user", "content": text}])).json()["tokens"]
        assert chat.count(2) == 2, "the template's own, whatever the settings say"

    scenario(work, tokenizer, special_tokens_in_prompts=special)


def test_a_token_without_an_embedding_is_refused_in_text_as_in_ids(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        s.client.info = replace(s.client.info, vocab_size=30_000)
        word = tokenizer.decode([40_000])
        await s.refused("/v1/completions", 400, "prompt", prompt=word)
        await s.refused("/v1/chat/completions", 400, "messages", messages=[{"role": "user", "content": word}])
        assert (await s.post("/v1/completions", prompt="a")).status_code == 200

    scenario(work, tokenizer)


def test_where_a_request_is_silent_the_model_says_how_it_is_sampled(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0, "top_k": 3, "eos_token_id": 9}')
    silent = {"prompt": [1], "max_tokens": 12, "seed": 5}
    answers: dict[str, str] = {}

    async def work(s: Site, name: str) -> None:
        answers[name] = (await s.post("/v1/completions", **silent)).json()["choices"][0]["text"]
        spoken = {"temperature": 0} if name == "off" else {"temperature": 1, "top_k": 0}
        answers[f"{name}, spoken"] = (await s.post("/v1/completions", **silent, **spoken)).json()["choices"][
            0
        ]["text"]
        shown = (await s.http.get("/v1/models")).json()["data"][0]["default_sampling_params"]
        assert shown == ({} if name == "off" else {"temperature": 0, "top_k": 3})

    scenario(lambda s: work(s, "on"), tokenizer, model=str(tmp_path))
    scenario(lambda s: work(s, "off"), tokenizer, model=str(tmp_path), generation_config=False)
    assert answers["on"] == answers["off, spoken"] != answers["off"] == answers["on, spoken"]


def test_usage_tells_preemptions_when_asked(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        body = {
            "prompt": ["a", "b", "c", "d"],
            "max_tokens": 30,
            "ignore_eos": True,
            "include_preemptions": True,
        }
        answer = (await s.post("/v1/completions", **body)).json()
        assert answer["usage"]["completion_tokens_details"]["num_preemptions"] > 0
        assert answer["usage"]["completion_tokens"] == 4 * 30

    scenario(work, tokenizer, kv_budget=64)


def test_prompt_logprobs_have_vllms_shape(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        answer = (await s.post("/v1/completions", prompt=[5, 6, 7], max_tokens=1, prompt_logprobs=2)).json()
        scores = answer["choices"][0]["prompt_logprobs"]
        assert scores[0] is None
        for token, score in zip((6, 7), scores[1:], strict=True):
            assert set(score[str(token)]) == {"logprob", "rank", "decoded_token"}
            assert sorted(entry["rank"] for entry in score.values() if entry["rank"])[:2] == [1, 2]

    scenario(work, tokenizer)


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(1, 3), (3, 1), (0, 2)])
def test_an_echo_and_prompt_logprobs_each_show_as_many_as_they_were_asked_for(
    tokenizer: Tokenizer, logprobs: int, prompt_logprobs: int
) -> None:
    async def work(s: Site) -> None:
        body = {"prompt": [5, 6, 7], "echo": True, "max_tokens": 0}
        counts = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        together = (await s.post("/v1/completions", **body, **counts)).json()["choices"][0]
        for field, count in counts.items():
            alone = (await s.post("/v1/completions", **body, **{field: count})).json()["choices"][0]
            assert together[field] == alone[field]
        assert {len(score) for score in together["logprobs"]["top_logprobs"][1:]} <= {logprobs, logprobs + 1}

    scenario(work, tokenizer)


def test_tokenize_and_detokenize(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        answer = (await s.post("/tokenize", prompt="Hello there", return_token_strs=True)).json()
        assert answer == {
            "count": 2,
            "max_model_len": MAX_LEN,
            "tokens": tokenizer.encode("Hello there"),
            "token_strs": ["Hello", " there"],
        }
        assert (await s.post("/detokenize", tokens=[40, 41])).json() == {"prompt": tokenizer.decode([40, 41])}
        chat = (await s.post("/tokenize", messages=HELLO)).json()
        assert chat["tokens"] == tokenizer.encode_chat(HELLO)
        info = (await s.http.get("/tokenizer_info")).json()
        assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")
        assert "add_generation_prompt" in info["chat_template"]
        await s.refused("/tokenize", 400, "prompt")
        await s.refused("/detokenize", 400, "tokens", tokens=[READS])
        await s.refused("/detokenize", 400, "tokens[0]", tokens=["a"])

    scenario(work, tokenizer)


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": None}),
        ("messages", {"messages": "Hello"}),
        ("messages[0].role", {"messages": [{"role": "robot", "content": "x"}]}),
        ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
        ("messages[0].tool_calls", {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}),
        ("temperature", {"temperature": "hot"}),
        ("temperature", {"temperature": 2.01}),
        ("top_p", {"top_p": -0.1}),
        ("top_k", {"top_k": 2**31}),
        ("repetition_penalty", {"repetition_penalty": 0.009}),
        ("service_tier", {"service_tier": "gold"}),
        ("n", {"n": 0}),
        ("n", {"n": 5}),
        ("n", {"n": True}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 1.5}),
        ("seed", {"seed": 2**63}),
        ("stop", {"stop": ["a"] * (MAX_STOPS + 1)}),
        ("stop", {"stop": ["a" * (MAX_STOP_LENGTH + 1)]}),
        ("stop", {"stop": [1]}),
        ("logit_bias", {"logit_bias": {str(READS): 1}}),
        ("logit_bias", {"logit_bias": {"x": 1}}),
        ("logit_bias", {"logit_bias": {"1" * 5000: 1}}),
        ("logit_bias", {"logit_bias": {"1": 101}}),
        ("logit_bias", {"logit_bias": {str(i): 0 for i in range(MAX_LOGIT_BIAS + 1)}}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("user", {"user": "u" * (MAX_USER_LENGTH + 1)}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("functions", {"functions": [{}]}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
        ("stop_token_ids", {"stop_token_ids": [READS]}),
        ("stop_token_ids[0]", {"stop_token_ids": [-1]}),
        ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
        ("priority", {"priority": "high"}),
        ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
        ("continue_final_message", {"continue_final_message": True}),
        ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
        ("chat_template_kwargs", {"chat_template_kwargs": [1]}),
        ("store", {"store": True}),
    ],
)
def test_a_bad_chat_field_is_refused_by_name(tokenizer: Tokenizer, param: str, body: dict[str, Any]) -> None:
    async def work(s: Site) -> None:
        error = await s.refused("/v1/chat/completions", 400, param, **({"messages": HELLO} | body))
        assert error["type"] == "invalid_request_error"
        assert param.split("[")[0] in error["message"]

    scenario(work, tokenizer, max_n=4)


def test_every_limit_admits_its_own_value(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        body: dict[str, Any] = {
            "messages": HELLO,
            "n": 4,
            "stop": ["a" * MAX_STOP_LENGTH] * MAX_STOPS,
            "user": "u" * MAX_USER_LENGTH,
            "logit_bias": {f"{'0' * i}1": 0 for i in range(MAX_LOGIT_BIAS)},
            "logprobs": True,
            "top_logprobs": 20,
            "temperature": 2,
            "max_tokens": 2,
            "min_tokens": 2,
            "seed": -(2**63),
            "stop_token_ids": [READS - 1],
            "top_k": 2**31 - 1,
            "priority": 2**31 - 1,
            "service_tier": "flex",
            "prompt_cache_retention": "24h",
            "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
        }
        assert (await s.post("/v1/chat/completions", **body)).status_code == 200
        prompts = ["a"] * 3
        least = {"repetition_penalty": 0.01, "prompt": [1], "max_tokens": 2}
        assert (await s.post("/v1/completions", **least)).status_code == 200
        assert (await s.post("/v1/completions", prompt=prompts, max_tokens=1)).status_code == 200
        error = await s.refused("/v1/completions", 400, "prompt", prompt=[*prompts, "a"], max_tokens=1)
        assert "4 prompts" in error["message"]

    scenario(work, tokenizer, max_n=4, max_prompts=3)


def test_no_number_is_too_large_to_be_refused(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        for number in (2**63, 2**64, -(2**63) - 1, 10**400, -(10**400)):
            wrong: list[dict[str, Any]] = [
                {"stop_token_ids": [number]},
                {"logit_bias": {"1": number}},
                *(
                    {field: number}
                    for field in (
                        *("n", "max_tokens", "max_completion_tokens", "min_tokens", "seed", "priority"),
                        *("temperature", "top_k", "top_p", "min_p", "top_logprobs", "prompt_logprobs"),
                        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
                    )
                ),
            ]
            for body in wrong:
                asked = {"messages": HELLO, "logprobs": True, "max_tokens": 2} | body
                response = await s.post("/v1/chat/completions", **asked)
                assert response.status_code == 400, (body, response.text)
            assert (await s.post("/v1/completions", prompt=[number])).status_code == 400
            assert (await s.post("/detokenize", tokens=[number])).status_code == 400

    scenario(work, tokenizer)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_more_choices_than_may_ever_wait_are_refused_at_once(tokenizer: Tokenizer, num_engines: int) -> None:
    async def work(s: Site) -> None:
        async with asyncio.timeout(5):
            while len(s.client.engines()) < num_engines:
                await asyncio.sleep(0.01)
        prompts = [[1], [2]] * num_engines
        assert (await s.post("/v1/completions", prompt=prompts, n=2, max_tokens=1)).status_code == 200
        beyond = [*prompts, *[[3]] * num_engines]
        error = await s.refused("/v1/completions", 400, "n", prompt=beyond, n=2, max_tokens=1)
        assert f"{6 * num_engines} choices" in error["message"]

    scenario(work, tokenizer, max_num_seqs=2, max_waiting=3, num_engines=num_engines)


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": [[]]}),
        ("prompt", {"prompt": [1, "a"]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": [READS]}),
        ("prompt", {"prompt": {"a": 1}}),
        ("suffix", {"suffix": "end"}),
        ("best_of", {"best_of": 2, "n": 3}),
        ("best_of", {"best_of": 2, "stream": True}),
        ("best_of", {"best_of": 17}),
        ("max_tokens", {"max_tokens": 0}),
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": True}),
    ],
)
def test_a_bad_completion_field_is_refused_by_name(
    tokenizer: Tokenizer, param: str, body: dict[str, Any]
) -> None:
    async def work(s: Site) -> None:
        await s.refused("/v1/completions", 400, param, **({"prompt": "a"} | body))

    scenario(work, tokenizer)


def test_lengths_are_refused_with_both_figures(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        fits = {"prompt": [1] * 40, "max_tokens": 60}
        assert (await s.post("/v1/completions", **fits)).status_code == 200
        error = await s.refused("/v1/completions", 400, "max_tokens", prompt=[1] * 40, max_tokens=61)
        assert error["code"] == "kv_budget_exceeded"
        assert "101" in error["message"]
        assert "100 tokens" in error["message"]
        error = await s.refused("/v1/completions", 400, "prompt", prompt=[1] * 40, max_tokens=MAX_LEN - 39)
        assert error["code"] == "context_length_exceeded"
        assert f"{MAX_LEN} tokens" in error["message"]
        assert f"{MAX_LEN + 1} tokens (40 in the prompt" in error["message"]
        error = await s.refused("/v1/completions", 400, "prompt", prompt=[1] * MAX_LEN)
        assert error["code"] == "context_length_exceeded"
        unbounded = await s.post("/v1/chat/completions", messages=HELLO, ignore_eos=True)
        assert unbounded.json()["usage"]["total_tokens"] == 100

    scenario(work, tokenizer, kv_budget=100)


def test_bodies_that_are_no_request_at_all(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        for content in (b"{", b"[]", b"3", b"", b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"a":' * 9999):
            response = await s.http.post("/v1/completions", content=content)
            assert response.status_code == 400, content[:20]
            assert response.json()["error"]["type"] == "invalid_request_error"
        response = await s.http.post("/v1/completions", content=b'{"prompt": "a", "temperature": NaN}')
        assert response.status_code == 400
        response = await s.http.get("/v1/nothing")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "unknown_url"
        wrong_method = await s.http.get("/v1/completions")
        assert wrong_method.status_code == 405
        assert wrong_method.headers["allow"] == "POST"
        error = await s.refused("/v1/chat/completions", 404, "model", model="gpt-4", messages=HELLO)
        assert error["code"] == "model_not_found"

    scenario(work, tokenizer)


def test_a_body_may_be_as_large_as_the_limit_and_no_larger(tokenizer: Tokenizer) -> None:
    limit = 2048

    async def work(s: Site) -> None:
        body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
        assert (await s.http.post("/v1/completions", content=body.ljust(limit))).status_code == 200
        assert (await s.http.post("/v1/completions", content=body.ljust(limit + 1))).status_code == 413

        async def undeclared() -> AsyncIterator[bytes]:
            yield body
            yield b" " * limit

        response = await s.http.post("/v1/completions", content=undeclared())
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        no_number = {b"Content-Length": "\u00b2".encode("latin-1")}
        assert (await s.http.post("/v1/completions", content=body, headers=no_number)).status_code == 200

    scenario(work, tokenizer, max_body_bytes=limit)


def test_a_full_queue_answers_429_and_when_to_come_back(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        options = {"prompt": [1], "max_tokens": 100, "ignore_eos": True}
        waiting = [asyncio.ensure_future(s.post("/v1/completions", **options)) for _ in range(6)]
        async with asyncio.timeout(5):
            while s.directory.engines[0].actor._steps._accepted < 6:
                await asyncio.sleep(0.01)
        refused = await s.post("/v1/completions", **options, stream=True)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert [(await response).status_code for response in waiting] == [200] * 6

    scenario(work, tokenizer, max_waiting=2, seconds=0.01)


def test_with_keys_every_request_needs_one(tokenizer: Tokenizer) -> None:
    seen: list[str] = []

    async def work(s: Site) -> None:
        steps = s.directory.engines[0].actor._steps
        original = steps.submit

        def spy(attachment: str, requests: Any, *, again: bool = False) -> str | None:
            seen.extend(request.tenant for request in requests)
            return original(attachment, requests, again=again)

        steps.submit = spy  # type: ignore[method-assign]
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/tokenize")):
                response = await s.http.request(method, path, headers=headers, json={"prompt": "a"})
                assert response.status_code == 401
                assert response.json()["error"]["type"] == "authentication_error"
        headers = {"Authorization": "Bearer secret", "X-Tenant-Id": "mallory"}
        response = await s.http.post(
            "/v1/completions", headers=headers, json={"prompt": "a", "user": "mallory"}
        )
        assert response.status_code == 200
        assert (await s.http.get("/health")).status_code == 200

    scenario(work, tokenizer, keys={digest("secret"): "alice"})
    assert seen == ["alice"]


def test_health_fails_while_work_waits_and_no_step_ends(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        assert (await s.http.get("/health")).json()["status"] == "ok"
        request = asyncio.ensure_future(s.post("/v1/completions", prompt=[1], max_tokens=2))
        await asyncio.sleep(0.05)
        connection = s.client._connections[0]
        assert connection.engine is not None
        connection.status = await connection.engine.renew("replica")
        unhealthy = await s.http.get("/health")
        assert unhealthy.status_code == 503
        assert unhealthy.json()["engines"]["engine-0"]["state"] == "stalled"
        assert (await request).status_code == 200
        assert (await s.http.get("/health")).status_code == 200
        s.directory.restarting = False
        s.directory.engines[0].kill()
        await asyncio.sleep(0.05)
        down = await s.http.get("/health")
        assert down.status_code == 503
        assert down.json()["engines"]["engine-0"] == {"state": "down"}
        assert (await s.post("/v1/completions", prompt=[1])).status_code == 503

    scenario(work, tokenizer, seconds=0.3, stall_seconds=0.02)


COMPLETION_SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "POST",
    "path": "/v1/completions",
    "query_string": b"",
    "headers": [],
}


def test_a_body_that_ends_halfway_is_no_bug_of_ours(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": b'{"prompt": [9', "more_body": True},
            {"type": "http.disconnect"},
        ]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return messages.pop(0)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await s.app(dict(COMPLETION_SCOPE), receive, send)
        assert sent[0]["status"] == 499

    scenario(work, tokenizer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("queued", [False, True])
def test_a_client_that_hangs_up_frees_its_slot_within_two_steps(
    tokenizer: Tokenizer, stream: bool, queued: bool
) -> None:
    async def work(s: Site) -> None:
        steps = s.directory.engines[0].actor._steps
        others: list[asyncio.Future[httpx.Response]] = []
        if queued:
            options = {"prompt": [[1]] * 4, "max_tokens": 40, "ignore_eos": True}
            others = [asyncio.ensure_future(s.post("/v1/completions", **options))]
        mine = len(others) * 4
        body = json.dumps({"prompt": [9], "max_tokens": 100, "stream": stream, "ignore_eos": True}).encode()
        hang_up = asyncio.Event()
        messages = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await hang_up.wait()
            return {"type": "http.disconnect"}

        async def send(_: dict[str, Any]) -> None:
            pass

        call = asyncio.ensure_future(s.app(dict(COMPLETION_SCOPE), receive, send))
        async with asyncio.timeout(10):
            while steps.status().running + steps.status().waiting <= mine:
                await asyncio.sleep(0.005)
            before = steps.status().steps
            hang_up.set()
            await call
            while steps._accepted > mine:
                await asyncio.sleep(0.001)
            assert steps.status().steps - before <= 2
        for other in others:
            assert (await other).status_code == 200

    scenario(work, tokenizer, seconds=0.03)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_step_is_an_error_and_the_next_request_is_not(tokenizer: Tokenizer, stream: bool) -> None:
    async def work(s: Site) -> None:
        # The toy model chokes on this token and on no other.
        body: dict[str, Any] = {"prompt": [POISON], "max_tokens": 4, "stream": stream}
        failed = await s.post("/v1/completions", **body)
        if stream:
            assert failed.status_code == 200
            line = failed.text.strip().split("\n")[-1]
            error = json.loads(line.removeprefix("data: "))["error"]
        else:
            assert failed.status_code == 500
            error = failed.json()["error"]
        assert error["code"] == "engine_error"
        assert "choked" in error["message"]
        assert (await s.post("/v1/completions", prompt=[1], max_tokens=4)).status_code == 200

    scenario(work, tokenizer)


async def prompt_of(s: Site, tokenizer: Tokenizer, **body: Any) -> str:
    """The text that the engine is given for a conversation."""
    return tokenizer.decode((await s.post("/tokenize", **body)).json()["tokens"])


def test_null_means_absent_at_any_depth(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        parts = [{"type": "text", "text": "Hello", "cache_control": None}]
        turn = {"role": "user", "content": parts, "name": None, "tool_calls": None}
        options = {
            **{"max_tokens": 2, "seed": None, "tools": None, "min_pp": None, "chat_template_kwargs": None},
            **{"logit_bias": {"5": None}, "response_format": {"type": None, "json_schema": None}},
        }
        stream_options = {"include_usage": None, "continuous_usage_stats": None}
        body = {"messages": [turn], "stream": True, "stream_options": stream_options}
        answer = await s.post("/v1/chat/completions", **body, **options)
        assert answer.status_code == 200, answer.text
        assert "x-ignored-fields" not in answer.headers
        assert not any("usage" in event for event in events(answer))

    scenario(work, tokenizer)


def test_text_parts_stand_on_lines_of_their_own(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
        assert await prompt_of(
            s, tokenizer, messages=[{"role": "user", "content": parts}]
        ) == await prompt_of(s, tokenizer, messages=[{"role": "user", "content": "One\nTwo"}])

    scenario(work, tokenizer)


def test_an_assistant_may_have_said_nothing(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        said: list[dict[str, Any]] = [{"content": ""}, {"content": None}, {}]
        turns = [{"role": "assistant", **turn} for turn in said]
        texts = [await prompt_of(s, tokenizer, messages=[*HELLO, turn, *HELLO]) for turn in turns]
        assert texts[0] == texts[1] == texts[2]

    scenario(work, tokenizer)


def test_a_template_gets_its_variables_and_ends_as_asked(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        begun = [*HELLO, {"role": "assistant", "content": "I am"}]
        opened = await prompt_of(s, tokenizer, messages=HELLO)
        closed = await prompt_of(s, tokenizer, messages=HELLO, add_generation_prompt=False)
        assert opened.removeprefix(closed) == "<|im_start|>assistant\n"
        continued = await prompt_of(s, tokenizer, messages=begun, continue_final_message=True)
        assert continued == f"{opened}I am"
        options = {"messages": begun, "max_tokens": 2, "continue_final_message": True}
        answer = (await s.post("/v1/chat/completions", **options)).json()
        assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode(continued, add_special_tokens=False))
        answer = (
            await s.post("/v1/chat/completions", messages=HELLO, max_tokens=2, add_generation_prompt=False)
        ).json()
        assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode(closed, add_special_tokens=False))

    scenario(work, tokenizer)


def test_an_empty_stop_is_none_and_sixteen_are_possible(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        options = {"prompt": "Go", "max_tokens": 12, "seed": 5, "ignore_eos": True}
        full = (await s.post("/v1/completions", **options)).json()["choices"][0]["text"]
        none: list[Any] = ["", [], [""], None]
        for stop in none:
            answer = (await s.post("/v1/completions", **options, stop=stop)).json()
            assert answer["choices"][0]["text"] == full
        many = [f"\0{i}" for i in range(15)] + [full[4:7]]
        cut = (await s.post("/v1/completions", **options, stop=many)).json()
        assert cut["choices"][0]["text"] == full[: full.index(full[4:7])]

    scenario(work, tokenizer)


def test_top_p_of_0_is_greedy(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        async def text(**options: Any) -> str:
            answer = await s.post("/v1/completions", prompt="Go", max_tokens=8, **options)
            return str(answer.json()["choices"][0]["text"])

        greedy = await text(temperature=0)
        assert {await text(top_p=0, seed=seed) for seed in range(3)} == {greedy}
        assert await text(seed=1) != greedy

    scenario(work, tokenizer)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_max_completion_tokens_is_the_newer_name(tokenizer: Tokenizer, path: str) -> None:
    async def work(s: Site) -> None:
        asked: Any = {"messages": HELLO} if "chat" in path else {"prompt": "Go"}
        options = {"max_completion_tokens": 3, "max_tokens": 9, "ignore_eos": True}
        answer = (await s.post(path, **asked, **options)).json()
        assert answer["usage"]["completion_tokens"] == 3

    scenario(work, tokenizer)


def test_best_of_returns_the_likeliest_by_token(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        def mean(choice: dict[str, Any]) -> float:
            scores = choice["logprobs"]["token_logprobs"]
            return float(sum(scores) / len(scores))

        prompts = ["One", "Two"]
        options = {"prompt": prompts, "max_tokens": 6, "seed": 3, "ignore_eos": True, "stop_token_ids": []}
        every = (await s.post("/v1/completions", **options, n=5, logprobs=0)).json()["choices"]
        best = (await s.post("/v1/completions", **options, n=2, best_of=5)).json()
        assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
        assert all(choice["logprobs"] is None for choice in best["choices"])
        expected = [
            choice["text"]
            for prompt in range(2)
            for choice in sorted(every[5 * prompt : 5 * prompt + 5], key=mean, reverse=True)[:2]
        ]
        assert [choice["text"] for choice in best["choices"]] == expected
        # All that was generated is paid for.
        assert best["usage"]["completion_tokens"] == 2 * 5 * 6

    scenario(work, tokenizer)


def test_unknown_fields_are_ignored_and_named_once_in_the_log(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("app.parsing.log.warning", lambda text, *args: said.append(text % args))

    async def work(s: Site) -> None:
        turns = [{**turn, "reasoning": "x", "refusal": None, "annotations": []} for turn in HELLO * 2]
        body: dict[str, Any] = {"messages": turns, "max_tokens": 1, "min_pp": 0, "b\r\nd\u00e9": 1}
        for stream in (False, True, False):
            answer = await s.post("/v1/chat/completions", **body, stream=stream)
            assert answer.status_code == 200
            assert answer.headers["x-ignored-fields"] == "min_pp, b%0D%0Ad%C3%A9, messages[].reasoning"
        assert [line.split()[5].rstrip(",") for line in said] == [
            "min_pp",
            "b%0D%0Ad%C3%A9",
            "messages[].reasoning",
        ]
        many = {f"{i:03}{'x' * 99}": 1 for i in range(300)}
        answer = await s.post("/v1/completions", prompt="a", max_tokens=1, **many)
        shown = answer.headers["x-ignored-fields"].split(", ")
        assert len(shown) == SHOWN_NAMES + 1
        assert max(map(len, shown)) == NAME_LENGTH
        assert shown[-1] == "..."
        assert len(said) == REMEMBERED_NAMES
        tokenized = await s.post("/tokenize", prompt="a", colour="red")
        assert tokenized.headers["x-ignored-fields"] == "colour"

    scenario(work, tokenizer)


def test_no_line_reader_splits_an_event(tokenizer: Tokenizer) -> None:
    separators = "\x85\u2028\u2029"

    async def work(s: Site) -> None:
        body = {"prompt": f"a{separators}b", "echo": True, "max_tokens": 1, "stream": True}
        answer = await s.post("/v1/completions", **body)
        lines = [line for line in answer.text.splitlines() if line]
        assert lines == [line for line in answer.text.split("\n") if line]
        assert events(answer)[0]["choices"][0]["text"].startswith(f"a{separators}b")

    scenario(work, tokenizer)


def test_a_stream_with_nothing_to_say_says_so(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        long = {"prompt": [1], "max_tokens": 30, "ignore_eos": True}
        others = [asyncio.ensure_future(s.post("/v1/completions", **long)) for _ in range(4)]
        async with asyncio.timeout(5):
            while s.directory.engines[0].actor._steps.status().running < 4:
                await asyncio.sleep(0.01)
        queued = await s.post("/v1/completions", prompt=[1], max_tokens=4, stream=True, ignore_eos=True)
        lines = queued.text.strip().split("\n\n")
        assert lines[:3] == [": keep-alive"] * 3
        assert lines[-1] == "data: [DONE]"
        assert [(await other).status_code for other in others] == [200] * 4

    scenario(work, tokenizer, seconds=0.03, keep_alive_seconds=0.1)


def two_gzip_members(data: bytes) -> bytes:
    return gzip.compress(data[:9]) + gzip.compress(data[9:])


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress, two_gzip_members])
def test_a_compressed_body_counts_as_what_it_holds(
    tokenizer: Tokenizer, pack: Callable[[bytes], bytes]
) -> None:
    limit = 2048
    encoding = {"Content-Encoding": "zstd" if pack is zstandard.compress else "gzip"}

    async def work(s: Site) -> None:
        body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()

        async def status(content: bytes, headers: dict[str, str] = encoding) -> int:
            return (await s.http.post("/v1/completions", content=content, headers=headers)).status_code

        assert await status(pack(body)) == 200
        assert await status(pack(body.ljust(limit))) == 200
        assert await status(pack(body.ljust(limit + 1))) == 413
        assert await status(pack(b" " * 50_000_000)[:limit]) == 413
        assert await status(pack(body)[:-9]) == 400
        assert await status(body) == 400
        for other in ("br", "gzip, zstd", "deflate"):
            assert await status(pack(body), {"Content-Encoding": other}) == 415

    scenario(work, tokenizer, max_body_bytes=limit)


def test_a_zstd_frame_may_not_ask_for_more_memory_than_a_window(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        parameters = zstandard.ZstdCompressionParameters(window_log=ZSTD_WINDOW.bit_length())
        packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        body = packer.compress(json.dumps({"prompt": [1], "max_tokens": 1}).encode()) + packer.flush()
        answer = await s.http.post("/v1/completions", content=body, headers={"Content-Encoding": "zstd"})
        assert answer.status_code == 400
        assert "zstd" in answer.json()["error"]["message"]

    scenario(work, tokenizer)


GET_ROUTES = [
    "/v1/models",
    f"/v1/models/{MODEL}",
    "/health",
    "/",
    "/live",
    "/trace",
    "/metrics",
    "/web/main.js",
]


@pytest.mark.parametrize("path", GET_ROUTES)
def test_whatever_can_be_got_has_a_head(tokenizer: Tokenizer, path: str) -> None:
    async def work(s: Site) -> None:
        head = await s.http.head(path)
        assert head.status_code == 200
        if path != "/live":  # It never ends.
            whole = await s.http.get(path)
            assert head.headers["content-type"] == whole.headers["content-type"]

    scenario(work, tokenizer)


def test_pages_of_this_machine_and_of_named_origins_may_ask(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        async def allowed(origin: str) -> bool:
            asked = {
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization",
            }
            preflight = await s.http.options("/v1/completions", headers={"Origin": origin, **asked})
            refused = await s.http.post("/v1/completions", headers={"Origin": origin}, content=b"{")
            assert refused.status_code == 401
            answers = [r.headers.get("access-control-allow-origin") == origin for r in (preflight, refused)]
            assert answers[0] == answers[1] == (preflight.status_code == 200)
            return preflight.status_code == 200

        assert await allowed("https://chat.example.org")
        assert await allowed("http://localhost:3000")
        assert await allowed("http://127.0.0.1:8080")
        assert not await allowed("https://localhost.example.org")
        assert not await allowed("https://example.org")
        plain = await s.http.options("/v1/completions")
        assert plain.status_code == 204
        assert plain.headers["allow"] == "POST"

    scenario(work, tokenizer, keys={digest("secret"): "alice"}, cors_origins=["https://chat.example.org"])


def test_every_refusal_is_counted_by_status_and_reason(tokenizer: Tokenizer) -> None:
    async def work(s: Site) -> None:
        key = {"Authorization": "Bearer secret"}
        post = functools.partial(s.http.post, "/v1/completions", headers=key)
        busy = asyncio.ensure_future(post(json={"prompt": [1], "max_tokens": 100, "n": 5}))
        async with asyncio.timeout(5):
            while s.directory.engines[0].actor._steps._accepted < 5:
                await asyncio.sleep(0.01)
        await post(json={"prompt": [1]})
        await post(json={"prompt": [1], "n": 0})
        await post(content=b"{")
        await post(content=b" " * 5000)
        await post(content=b"x", headers=key | {"Content-Encoding": "br"})
        await post(json={"prompt": "a", "model": "gpt-4"})
        await s.http.post("/v1/completions", json={"prompt": "a"})
        await s.http.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": "Bearer wrong"})
        await s.http.get("/nowhere")
        await s.http.get("/v1/completions")
        await busy
        s.directory.restarting = False
        s.directory.engines[0].kill()
        async with asyncio.timeout(5):
            while s.client.engines():
                await asyncio.sleep(0.01)
        await post(json={"prompt": [1]})
        await s.http.get("/health")
        expected = {
            (400, "invalid_value"): 1,
            (400, "invalid_request"): 1,
            (401, "no_api_key"): 1,
            (401, "invalid_api_key"): 1,
            (404, "model_not_found"): 1,
            (404, "unknown_url"): 1,
            (405, "method_not_allowed"): 1,
            (413, "body_too_large"): 1,
            (415, "unsupported_encoding"): 1,
            (429, "queue_full"): 1,
            (503, "engine_unavailable"): 1,
            (503, "unhealthy"): 1,
        }
        answer = await s.http.get("/metrics", headers=key)
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        for (status, reason), count in expected.items():
            line = f'slotserve_http_refusals_total{{reason="{reason}",status="{status}"}} {count}.0'
            assert line in answer.text
        # What this replica has counted has reached the place where those of all meet.
        assert s.directory.refusals == expected

    scenario(
        work, tokenizer, keys={digest("secret"): "alice"}, max_waiting=1, seconds=0.01, max_body_bytes=2048
    )
