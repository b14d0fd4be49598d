"""vLLM's offline engine on the CPU as a worker."""

from __future__ import annotations

import os

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import vllm

from bench.engines.worker import Generate, Job, Setup, serve


def build(setup: Setup) -> Generate:
    """Compiled (its default), prefix caching off: no two prompts share one."""
    limits = {"max_num_seqs": setup.slots, "max_model_len": setup.max_len}
    llm = vllm.LLM(setup.model, dtype="float32", enable_prefix_caching=False, **limits)

    def generate(jobs: list[Job]) -> list[list[int]]:
        prompts = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt, _ in jobs]
        params = [vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in jobs]
        done = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in done]

    return generate


if __name__ == "__main__":
    serve(build, version=vllm.__version__, numbers="fp32")
