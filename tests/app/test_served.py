"""The whole of it: `serve run`, the packaged model, and the official client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.serving import Server, served

PROMPTS = [
    f"Write one sentence about the number {n} and a {a}."
    for n in range(8)
    for a in ("cat", "sea", "key", "hat")
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served({"max_num_seqs": 8, "max_len": 1024}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(client: openai.OpenAI, prompt: str, **options: Any) -> str:
    answer = client.chat.completions.create(
        model="SmolLM2-135M-Instruct.Q4_1",
        messages=[{"role": "user", "content": prompt}],
        **({"max_tokens": 24, "temperature": 0.7, "seed": 7} | options),
    )
    return answer.choices[0].message.content or ""


def stream(client: openai.OpenAI, prompt: str) -> str:
    chunks = client.chat.completions.create(
        model="SmolLM2-135M-Instruct.Q4_1",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=24,
        temperature=0.7,
        seed=7,
        stream=True,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_parallel_streams_give_the_text_they_give_alone(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: stream(client, prompt), PROMPTS))
    alone = [ask(client, prompt) for prompt in PROMPTS]
    assert together == alone
    assert len(set(alone)) > len(PROMPTS) // 2
