"""The non-negotiable test: company, chunks and recompute never change a bit of an answer."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import starve
from bench.exactness import random_requests, run_alone, run_busy
from engine_actor.scheduler import Mode
from model.loader import load_model
from model.transformer import Transformer
from policies import POLICIES
from tests.model.test_transformer import VARIANTS, save_random_model

MODES: tuple[Mode, ...] = ("chunked", "batched", "separate")


def ignore(steps: float = 1.0) -> None:
    pass


def assert_company_changes_nothing(model: Transformer, requests: int, prompt: int, output: int) -> None:
    assert model.exact
    kv = model.new_storage(4, 128, poison=True)
    rng = random.Random(3)
    asked = random_requests(rng, requests, model.vocab_size, prompt, output)
    alone = run_alone(model, kv, asked, ignore)
    assert len(alone.tokens) > sum(request.params.max_tokens for request in asked)
    assert alone.preemptions == 0
    preemptions = resumes = 0
    for mode in MODES:
        busy = run_busy(model, kv, asked, rng, mode, ignore)
        preemptions += busy.preemptions
        resumes += busy.resumes
        assert busy.steps < alone.steps
        assert alone.differs_at(busy) == []
    assert preemptions > 0
    assert resumes > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_models(variant: str, tmp_path: Path) -> None:
    save_random_model(tmp_path, variant)
    assert_company_changes_nothing(load_model(tmp_path, device="cpu"), requests=12, prompt=60, output=24)


def test_the_packaged_model() -> None:
    assert_company_changes_nothing(load_model(device="cpu"), requests=6, prompt=40, output=10)


def test_a_starved_pool_changes_nothing_under_any_policy(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama")
    model = load_model(tmp_path, device="cpu")
    work = starve.crowd(10, model.vocab_size)
    _, unstarved = starve.drive(model, work, "fcfs", None, ignore)
    assert len(unstarved.tokens) == len(unstarved.digests) == work.output_tokens
    for policy in POLICIES:
        run, starved = starve.drive(model, work, policy, 96, ignore)
        assert unstarved.differs_at(starved) == []
        assert sum(t.preemptions for t in run.requests) > 0


def test_one_changed_token_is_one_difference(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama")
    model = load_model(tmp_path, device="cpu")
    kv = model.new_storage(4, 128)
    asked = random_requests(random.Random(3), 2, model.vocab_size, 10, 4)
    alone, again = (run_alone(model, kv, asked, ignore) for _ in range(2))
    position = next(iter(again.tokens))
    again.tokens[position] = replace(again.tokens[position], token=-1)
    assert alone.differs_at(again) == [position]


def test_the_readmes_notebook_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    section = readme.partition("## Without Ray")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 8
    assert printed[0].startswith("0 [('a', ")
    assert all("'b'" in line for line in printed)


BITS = """
import hashlib, random, sys
import numba
from bench.exactness import random_requests, run_busy
from model.loader import load_model
model = load_model(sys.argv[1], device="cpu")
asked = random_requests(random.Random(3), 8, model.vocab_size, 90, 12)
trail = run_busy(model, model.new_storage(4, 128), asked, random.Random(4), "chunked", lambda: None)
bits = hashlib.blake2b(b"".join(trail.digests[key] for key in sorted(trail.digests)))
print(numba.get_num_threads(), len(trail.digests), bits.hexdigest())
"""


def test_threads_that_really_run_side_by_side_change_no_bit(tmp_path: Path) -> None:
    """In processes of their own: this one's kernels run on one thread."""
    save_random_model(tmp_path, "llama")
    runs = {}
    for threads in ("1", "4"):
        environment = os.environ | {"NUMBA_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        command = [sys.executable, "-c", BITS, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        runs[done.stdout.split()[0]] = done.stdout.split()[1:]
    assert runs["1"] == runs["4"]
