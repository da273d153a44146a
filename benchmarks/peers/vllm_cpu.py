"""vLLM's CPU build: its engine stepped in this process, prefix caching on, everything else as it comes."""

from __future__ import annotations

import os
import time

from benchmarks.peers.worker import Start, Times, serve
from benchmarks.peers.workload import Workload


class Vllm:
    def __init__(self, start: Start) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM  # type: ignore[import-not-found, unused-ignore]

        self.dtype = "bfloat16" if start.fast_bfloat16 else "float32"
        self.llm = LLM(
            str(start.model), dtype=self.dtype, max_model_len=8192, max_num_seqs=64, enable_prefix_caching=True
        )
        self.calls = 0

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Times:
        from vllm import SamplingParams  # type: ignore[import-not-found, unused-ignore]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found, unused-ignore]

        params = SamplingParams(
            temperature=0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.calls += 1
        engine = self.llm.llm_engine
        times: dict[str, list[float]] = {f"{self.calls}-{i}": [] for i in range(len(prompts))}
        began = time.perf_counter()
        for name, prompt in zip(times, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                times[output.request_id].extend([now] * len(output.outputs[0].token_ids))
        return list(times.values())

    def note(self, workload: Workload) -> str:
        return self.dtype


if __name__ == "__main__":
    serve(Vllm)
