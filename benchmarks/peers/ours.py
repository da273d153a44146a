"""Anaphora in-process, the public way: prepare, load, then Engine.add and Engine.step."""

from __future__ import annotations

import time

from benchmarks.peers.worker import Start, Times, serve
from benchmarks.peers.workload import Workload

from anaphora.engine.build import Startup, load, prepare
from anaphora.engine.config import UserConfig
from anaphora.engine.engine import Engine
from anaphora.engine.params import SamplingParams
from anaphora.engine.sources.resolve import resolve_model

KV_MEMORY = 3 << 30


class Ours:
    def __init__(self, engine: Engine, note: str) -> None:
        self.engine = engine
        self._note = note
        self.calls = 0

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Times:
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        self.calls += 1
        times: dict[str, list[float]] = {f"{self.calls}-{i}": [] for i in range(len(prompts))}
        began = time.perf_counter()
        for name, prompt in zip(times, prompts, strict=True):
            self.engine.add(name, prompt, params)
        while self.engine.has_work:
            outputs = self.engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(output.error)
                # A token whose text is held back comes with a later delta; the count is of this step.
                stream = times[output.request_id]
                stream.extend([now] * (output.num_output_tokens - len(stream)))
        return list(times.values())

    def note(self, workload: Workload) -> str:
        return self._note


def start(given: Start) -> Ours:
    prepared = prepare(resolve_model(str(given.model)), UserConfig(kv_memory=KV_MEMORY))
    return Ours(load(prepared, Startup()), f"{prepared.config.dtype}")


if __name__ == "__main__":
    serve(start)
