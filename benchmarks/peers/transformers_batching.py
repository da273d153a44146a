"""transformers' continuous batching: its manager thread, paged cache and prefix sharing."""

from __future__ import annotations

import time

import torch
from benchmarks.peers.worker import Start, Times, serve
from benchmarks.peers.workload import Workload
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

PAGE, PAGES = 32, 1280
"""Tokens of a page and pages of the cache: room for 40,960 tokens."""


class Batching:
    def __init__(self, start: Start) -> None:
        self.dtype = torch.bfloat16 if start.fast_bfloat16 else torch.float32
        torch.set_num_threads(start.threads)
        model = AutoModelForCausalLM.from_pretrained(start.model, dtype=self.dtype, attn_implementation="sdpa").eval()
        self.manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=64),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=PAGES, max_batch_tokens=512, max_requests_per_batch=64
            ),
        )
        with torch.inference_mode():
            self.manager.start()
        self.calls = 0

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Times:
        self.calls += 1
        times: dict[str, list[float]] = {f"{self.calls}-{i}": [] for i in range(len(prompts))}
        left = set(times)
        began = time.perf_counter()
        for name, prompt in zip(times, prompts, strict=True):
            self.manager.add_request(prompt, name, new_tokens, streaming=True, eos_token_id=-1)
        while left:
            output = self.manager.get_result(timeout=1)
            now = time.perf_counter() - began
            if output is None:
                if not self.manager.is_running():
                    raise RuntimeError("its generation thread ended; see the log")
                continue
            if output.error:
                raise RuntimeError(output.error)
            if output.request_id in times:
                stream = times[output.request_id]
                stream.extend([now] * (len(output.generated_tokens) - len(stream)))
                if output.is_finished():
                    left.discard(output.request_id)
        return list(times.values())

    def note(self, workload: Workload) -> str:
        return str(self.dtype).removeprefix("torch.")


if __name__ == "__main__":
    serve(Batching)
