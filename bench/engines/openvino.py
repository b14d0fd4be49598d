"""OpenVINO GenAI's continuous batching pipeline as a worker; it reads the GGUF file itself."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import openvino as ov
import openvino_genai as genai

from bench.engines.worker import Job, Setup, serve


class OpenVino:
    """Settings it leaves to the caller: `slots` sequences, KV for all of them at `max_len`."""

    version = version("openvino-genai")
    format = "GGUF weights, int8 dynamic activations"

    def __init__(self, setup: Setup) -> None:
        config = genai.SchedulerConfig()
        config.max_num_seqs = setup.slots
        config.cache_size = 2
        config.enable_prefix_caching = False
        self._pipeline = genai.ContinuousBatchingPipeline(
            setup.model, config, "CPU", {"INFERENCE_NUM_THREADS": setup.threads}
        )

    def generate(self, jobs: list[Job]) -> list[list[int]]:
        handles = []
        for index, (prompt, tokens) in enumerate(jobs):
            config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
            handles.append(self._pipeline.add_request(index, ov.Tensor(np.array([prompt])), config))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]


if __name__ == "__main__":
    serve(OpenVino)
