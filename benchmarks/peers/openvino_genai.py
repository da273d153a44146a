"""OpenVINO GenAI: its continuous batching pipeline stepped in this process, prefix caching on."""

from __future__ import annotations

import time

import numpy as np
import openvino  # type: ignore[import-not-found, unused-ignore]
import openvino_genai as genai  # type: ignore[import-not-found, unused-ignore]
from benchmarks.peers.worker import Start, Times, serve
from benchmarks.peers.workload import Workload

KV_GIB = 2


class OpenVino:
    def __init__(self, start: Start) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = KV_GIB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 512
        path = start.cache / "openvino-models" / start.model.name
        self.pipeline = genai.ContinuousBatchingPipeline(
            str(path), scheduler, "CPU", {"INFERENCE_NUM_THREADS": start.threads, "KV_CACHE_PRECISION": "f16"}
        )
        self.calls = 0

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Times:
        config = genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        began = time.perf_counter()
        handles = []
        for prompt in prompts:
            self.calls += 1
            handles.append(
                self.pipeline.add_request(self.calls, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
            )
        times: Times = [[] for _ in prompts]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            now = time.perf_counter() - began
            for handle, stream in zip(handles, times, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        stream.extend([now] * len(output.generated_ids))
        return times

    def note(self, workload: Workload) -> str:
        return "f16"


if __name__ == "__main__":
    serve(OpenVino)
