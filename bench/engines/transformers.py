"""transformers' continuous batching as a worker."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.engines.worker import Generate, Job, Setup, serve


def build(setup: Setup) -> Generate:
    """`slots` requests a batch, paged SDPA attention, no end of sequence."""
    torch.set_num_threads(setup.threads)
    model = AutoModelForCausalLM.from_pretrained(
        setup.model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    batching = ContinuousBatchingConfig(
        max_requests_per_batch=setup.slots,
        max_batch_tokens=256,
        num_blocks=setup.slots * setup.max_len // 256,
        allow_block_sharing=False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings = {"generation_config": greedy, "continuous_batching_config": batching}

    @torch.inference_mode()
    def generate(jobs: list[Job]) -> list[list[int]]:
        with model.continuous_batching_context_manager(
            **settings, persistent_manager=True, warmup=False
        ) as manager:
            for index, (prompt, tokens) in enumerate(jobs):
                manager.add_request(prompt, request_id=str(index), max_new_tokens=tokens, eos_token_id=-1)
            outputs: dict[int, list[int]] = {}
            while len(outputs) < len(jobs):
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError("the manager stopped")
                if result.is_finished():
                    outputs[int(result.request_id)] = result.generated_tokens
        return [outputs[index] for index in range(len(jobs))]

    # The first jobs build the manager and its KV, which stay: that is not to be timed.
    generate([([0], 1)])
    return generate


if __name__ == "__main__":
    serve(build, version=transformers.__version__, numbers="fp32")
