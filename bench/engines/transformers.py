"""transformers' continuous batching as a worker."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.engines.worker import Job, Setup, serve


class Transformers:
    """`slots` requests a batch, paged SDPA attention, no end of sequence."""

    version = transformers.__version__
    format = "fp32"

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            setup.model, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._config = ContinuousBatchingConfig(
            max_requests_per_batch=setup.slots,
            max_batch_tokens=256,
            num_blocks=setup.slots * setup.max_len // 256,
            allow_block_sharing=False,
        )
        # The first jobs build the manager and its KV, which stay: that is not to be timed.
        self.generate([([0], 1)])

    def generate(self, jobs: list[Job]) -> list[list[int]]:
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        with (
            torch.inference_mode(),
            self._model.continuous_batching_context_manager(
                generation_config=greedy,
                continuous_batching_config=self._config,
                persistent_manager=True,
                warmup=False,
            ) as manager,
        ):
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


if __name__ == "__main__":
    serve(Transformers)
