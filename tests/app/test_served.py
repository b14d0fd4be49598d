"""The whole of it: `serve run` with two replicas and two engines, the packaged model, the official client."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.serving import Server, served, stop

SLOTS = 4
MODEL = "SmolLM2-135M-Instruct.Q4_1"
LISTENING, LOOPBACK = "0A", "0100007F"
"""In /proc/net/tcp."""
PROMPTS = [
    f"Tell me about {count} {thing}."
    for count in (3, 7, 11, 20)
    for thing in ("cats", "maps", "keys", "hats", "seas", "sons", "tins", "oaks")
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served({"num_engines": 2, "num_replicas": 2, "max_num_seqs": SLOTS, "max_len": 1024}) as running:
        yield running
        assert stop(running) == [], "processes outlived the server"


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def stream(client: openai.OpenAI, prompt: str, **options: Any) -> Iterator[str]:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        stream=True,
        **({"max_tokens": 16, "temperature": 0.8, "seed": 7} | options),
    )
    return (chunk.choices[0].delta.content or "" for chunk in chunks)


def engines(server: Server) -> dict[str, Any]:
    states: dict[str, Any] = httpx.get(f"{server.url}/health", timeout=10).json()["engines"]
    return states


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.1)


def running(server: Server) -> int:
    return sum(engine.get("running", 0) + engine.get("waiting", 0) for engine in engines(server).values())


def steps(server: Server) -> int:
    return sum(engine.get("steps", 0) for engine in engines(server).values())


def test_32_parallel_streams_give_the_text_they_give_alone(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: "".join(stream(client, prompt)), PROMPTS))
    alone = [
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=16,
            temperature=0.8,
            seed=7,
        )
        .choices[0]
        .message.content
        for prompt in PROMPTS
    ]
    assert together == alone
    assert len(set(alone)) > len(PROMPTS) // 2


def test_log_probabilities_and_choices_reach_the_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a colour."}],
        n=2,
        max_tokens=4,
        seed=1,
        logprobs=True,
        top_logprobs=2,
        extra_body={"prompt_logprobs": 0},
    )
    assert answer.usage is not None
    assert len((answer.model_extra or {})["prompt_logprobs"]) == answer.usage.prompt_tokens
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content)
        text = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
        assert text.decode(errors="replace") == choice.message.content


def test_errors_come_as_the_client_knows_them(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("gpt-4")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="word " * 1100)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as hot:
        client.completions.create(model=MODEL, prompt="a", temperature=9)
    assert hot.value.param == "temperature"


def test_every_answer_has_one_request_id_the_clients_own_if_it_sent_one(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    asked: list[tuple[str, str, Any]] = [
        ("POST", "/v1/completions", body),
        ("POST", "/v1/completions", body | {"stream": True}),
        ("POST", "/v1/completions", {}),
        ("GET", "/v1/nothing", None),
        ("GET", "/health", None),
        ("HEAD", "/metrics", None),
        ("OPTIONS", "/v1/completions", None),
    ]
    seen = set()
    for method, path, content in asked:
        url = f"{server.url}{path}"
        own = httpx.request(method, url, json=content, headers={"X-Request-Id": "mine-1"}, timeout=60)
        assert own.headers.get_list("x-request-id") == ["mine-1"], (method, path, own.status_code)
        (given,) = httpx.request(method, url, json=content, timeout=60).headers.get_list("x-request-id")
        seen.add(given)
    assert len(seen) == len(asked)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_hangs_up_frees_its_slot(server: Server, streaming: bool) -> None:
    tokens = 1000
    body = json.dumps({"prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "stream": streaming})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
    before = steps(server)
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall((head + body).encode())
        until(lambda: running(server) == 1, 20)
    until(lambda: running(server) == 0, 20)
    assert steps(server) - before < tokens


def test_haproxy_listens_where_the_configuration_says_and_nowhere_else(server: Server) -> None:
    addresses = set()
    for pid in server.pids("haproxy.cfg"):
        sockets = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and f"socket:[{fields[9]}]" in sockets:
                    addresses.add(fields[1].partition(":")[0])
    assert addresses == {LOOPBACK}


def test_streams_go_on_when_an_engine_dies(server: Server, client: openai.OpenAI) -> None:
    prompts = PROMPTS[:4]
    options = {"max_tokens": 120, "extra_body": {"ignore_eos": True}}
    with ThreadPoolExecutor(len(prompts)) as pool:
        expected = list(pool.map(lambda prompt: "".join(stream(client, prompt, **options)), prompts))
        streams = [stream(client, prompt, **options) for prompt in prompts]
        beginnings = ["".join(next(each) for _ in range(5)) for each in streams]
        busiest = max(engines(server).items(), key=lambda item: item[1]["running"])[0]
        assert engines(server)[busiest]["running"] > 0
        victim = engines(server)[busiest]["pid"]
        os.kill(victim, signal.SIGKILL)
        texts = list(pool.map(lambda each: "".join(each), streams))
    assert [a + b for a, b in zip(beginnings, texts, strict=True)] == expected
    assert "resuming" in server.log
    until(lambda: engines(server)[busiest].get("pid", victim) != victim, 60)


def test_replicas_that_die_leave_nothing_behind(server: Server) -> None:
    # More than the engines could finish before they miss the replicas.
    sequences, tokens = 4 * 16, 1000
    body = {"prompt": ["Once"] * 4, "n": 16, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    before = steps(server)
    with (
        httpx.Client(timeout=30) as http,
        http.stream("POST", f"{server.url}/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        replicas = server.pids("ray::ServeReplica:slotserve:Ingress")
        assert len(replicas) == 2
        for pid in replicas:
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(httpx.HTTPError):
            assert "[DONE]" not in "".join(lines)
    until(lambda: _idle(server), 60)
    assert steps(server) - before < sequences * tokens / SLOTS


def _idle(server: Server) -> bool:
    try:
        return running(server) == 0
    except (httpx.HTTPError, ValueError, KeyError):
        return False
