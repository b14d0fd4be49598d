"""From settings to an engine with a model in it, and what to tell people about it."""

from __future__ import annotations

import hashlib
import os

import numba
import numpy as np
import torch

from engine_actor.engine import Engine
from engine_actor.messages import EngineConfig, EngineInfo
from engine_actor.request import Request
from model import sampler
from model.batch import Batch
from model.executor import SamplingParams
from model.executors import build_executor
from model.files import find_model
from model.loader import load_model
from model.storage import SlotStorage
from model.transformer import Transformer
from policies import load_policy


def build_engine(config: EngineConfig) -> tuple[Engine, EngineInfo]:
    """Load the model and put an engine around it, on the thread that will step it.

    Raises what the loader or a policy raises: the message names what is wrong.
    """
    # Ray starts workers with OMP_NUM_THREADS=1, and the count belongs to the calling thread.
    threads = config.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))

    model = load_model(config.model, device=config.device, dtype=config.dtype)
    max_len = min(config.max_len, model.config.context)
    executor = build_executor(model, config.max_num_seqs, max_len, memory_fraction=config.gpu_memory_fraction)
    bits = _warm_up(model, executor.storage)
    engine = Engine(
        executor,
        load_policy(config.policy, **config.policy_settings),
        mode=config.mode,
        max_step_tokens=config.max_step_tokens,
        kv_budget=config.kv_budget_tokens,
        prefix_reuse=config.prefix_reuse,
        itl_target=config.itl_target,
    )
    return engine, _describe(config, engine, model, executor.storage, threads, bits)


def _warm_up(model: Transformer, storage: SlotStorage) -> bytes:
    """Compile the kernels and touch the weights, so that no request waits for it. Uses the scratch slot.

    Returns the bits of what these weights on this machine say to fixed tokens.
    """
    bits = b""
    for rows in (min(16, storage.max_len), 1):
        steps = np.arange(rows, dtype=np.int64)
        tokens = np.linspace(0, model.vocab_size - 1, rows, dtype=np.int64)
        batch = Batch(tokens, steps, np.full_like(steps, storage.scratch), steps[-1:])
        logits = model.forward(batch, storage)
        bits += logits.cpu().numpy().tobytes()
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, top_p=0.9, logprobs=1)
        sampler.sample(logits, [Request("warm-up", [0], params)])
    return bits


def _describe(
    config: EngineConfig,
    engine: Engine,
    model: Transformer,
    storage: SlotStorage,
    threads: int,
    bits: bytes,
) -> EngineInfo:
    name = find_model(config.model).name
    counts = model.row_counts
    device, dtype = model.backend.device.type, str(model.backend.dtype).removeprefix("torch.")
    outputs_depend_on = f"{name} {model.config} {device} {dtype} {torch.__version__}"
    exactness = "bit-exact in any batch" if model.exact else "NOT bit-exact on this machine"
    fewer = f" (no more of {config.max_num_seqs} fit)" if storage.num_slots < config.max_num_seqs else ""
    summary = (
        f"{name} on {device} in {dtype}; {exactness} "
        f"({len(counts.kept)} of {len(counts.candidates)} row counts agree); "
        f"{storage.num_slots} slots of {storage.max_len} tokens{fewer}, {storage.nbytes / 2**20:.0f} MB KV, "
        f"budget {engine.scheduler.kv_budget} tokens; {threads} threads; "
        f"policy {engine.scheduler.policy.name}, mode {config.mode}"
    )
    return EngineInfo(
        summary=summary,
        vocab_size=model.vocab_size,
        max_len=storage.max_len,
        largest_request=engine.scheduler.largest_request,
        exact=model.exact,
        fingerprint="fp_" + hashlib.blake2b(outputs_depend_on.encode() + bits, digest_size=5).hexdigest(),
        slots=storage.num_slots,
        mode=config.mode,
        policy=engine.scheduler.policy.name,
        eos_token_ids=model.config.eos_token_ids,
    )
