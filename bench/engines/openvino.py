"""OpenVINO GenAI's continuous batching pipeline as a worker; it reads the GGUF file itself."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import openvino as ov
import openvino_genai as genai

from bench.engines.worker import Generate, Job, Setup, serve


def build(setup: Setup) -> Generate:
    """Settings it leaves to the caller: `slots` sequences, KV for all of them at `max_len`."""
    scheduling = genai.SchedulerConfig()
    scheduling.max_num_seqs = setup.slots
    scheduling.cache_size = 2
    scheduling.enable_prefix_caching = False
    threads = {"INFERENCE_NUM_THREADS": setup.threads}
    pipeline = genai.ContinuousBatchingPipeline(setup.model, scheduling, "CPU", threads)

    def generate(jobs: list[Job]) -> list[list[int]]:
        handles = []
        for index, (prompt, tokens) in enumerate(jobs):
            config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
            handles.append(pipeline.add_request(index, ov.Tensor(np.array([prompt])), config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    return generate


if __name__ == "__main__":
    serve(build, version=version("openvino-genai"), numbers="GGUF weights, int8 dynamic activations")
