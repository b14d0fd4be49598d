"""The snippets of docs/clients.md, run as they stand, against a server of their own: `make clients`.

They run in run/clients, an environment with the versions that requirements.txt and package.json pin.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serving import ROOT, Server, served

HOME = ROOT / "run" / "clients"
SECTION = re.compile(r"^## (?P<client>.+?)$.*?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.M | re.S)
SNIPPETS = {found["client"]: found for found in SECTION.finditer((ROOT / "docs" / "clients.md").read_text())}
SETTINGS_ONLY = ("Open WebUI", "Continue", "aider")
CHATTING = [name for name in SNIPPETS if name.startswith(("OpenAI", "LiteLLM", "LangChain", "llm"))]
QUESTION = {
    "messages": [{"role": "user", "content": "What is continuous batching?"}],
    "max_tokens": 24,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served({"max_num_seqs": 8, "max_len": 1024}) as running:
        yield running


@pytest.fixture(scope="module")
def answer(server: Server) -> str:
    """What the question is answered with, asked without any client."""
    asked = httpx.post(f"{server.url}/v1/chat/completions", json=QUESTION, timeout=120).json()
    text: str = asked["choices"][0]["message"]["content"]
    return text


def run(client: str, server: Server, folder: Path) -> str:
    """Run a snippet; what it printed."""
    language, code = SNIPPETS[client]["language"], SNIPPETS[client]["code"]
    assert "http://127.0.0.1:8000" in code
    code = code.replace("http://127.0.0.1:8000", server.url)
    if language == "python":
        command = [str(HOME / "bin" / "python"), "-c", code]
    elif language == "js":
        script = HOME / "snippet.mjs"
        script.write_text(code)
        command = ["node", str(script)]
    else:
        command = ["bash", "-euc", code]
    environment = {
        **os.environ,
        "PATH": f"{HOME / 'bin'}:{os.environ['PATH']}",
        "LLM_USER_PATH": str(folder),
        "HF_HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("client", CHATTING)
def test_a_client_shows_the_servers_answer(client: str, server: Server, answer: str, tmp_path: Path) -> None:
    if SNIPPETS[client]["language"] == "js" and shutil.which("node") is None:
        pytest.skip("node is not installed")
    assert run(client, server, tmp_path).strip() == answer.strip()


def test_the_harness_scores_and_generates(server: Server, tmp_path: Path) -> None:
    shown = run("LM Evaluation Harness", server, tmp_path)
    figures = {
        cells[1]: float(cells[7])
        for line in shown.splitlines()
        if len(cells := [cell.strip() for cell in line.split("|")]) > 8 and cells[1].startswith("capitals")
    }
    assert figures.keys() == {"capitals", "capitals_choice"}
    assert figures["capitals_choice"] == 1, "the model knows these capitals, if it is read and scored rightly"


def test_guidellm_completes_every_request(server: Server, tmp_path: Path) -> None:
    before = _ended(server)
    run("GuideLLM", server, tmp_path)
    assert _ended(server) - before >= 8


def _ended(server: Server) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    ended = (line for line in lines if line.startswith("slotserve_requests_total{"))
    return sum(float(line.rpartition(" ")[2]) for line in ended if '"length"' in line or '"stop"' in line)


def test_every_client_of_the_page_is_run_or_said_not_to_be() -> None:
    page = (ROOT / "docs" / "clients.md").read_text()
    named = re.findall(r"^## (.+)$", page, re.M)
    assert set(named) == {*CHATTING, *SETTINGS_ONLY, "LM Evaluation Harness", "GuideLLM"}
