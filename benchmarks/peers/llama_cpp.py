"""llama.cpp through its C API (the ctypes binding of the same source): one decode call per step, as its server does.

Sequences keep their keys and values between calls; a prefix that streams share is computed once and then belongs
to all of them (`llama_memory_seq_cp`), as its server does within a slot. The file format is the fastest of those
made from the same weights (bf16, f16, f32), tried at load for one stream, many streams and prompts apart.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers.worker import Start, Times, serve
from benchmarks.peers.workload import Workload, plain_ids, token_ids
from llama_cpp import llama_cpp as api  # type: ignore[import-not-found, unused-ignore]

FORMATS = ("bf16", "f16", "f32")
N_BATCH = 2048
SHARED_FROM = 256


@dataclass
class Context:
    """A llama.cpp context and the tokens that each of its sequences holds."""

    pointer: Any
    batch: Any
    held: list[list[int]]
    vocabulary: int

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, sequence, wants logits) rows; the most likely next token of those that ask."""
        batch, chosen = self.batch, []
        for first in range(0, len(rows), N_BATCH):
            part = rows[first : first + N_BATCH]
            batch.n_tokens = len(part)
            for i, (token, position, sequence, wanted) in enumerate(part):
                batch.token[i] = token
                batch.pos[i] = position
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = wanted
            code = api.llama_decode(self.pointer, batch)
            if code:
                raise RuntimeError(f"llama_decode returned {code}")
            for i, row in enumerate(part):
                if row[3]:
                    logits = np.ctypeslib.as_array(api.llama_get_logits_ith(self.pointer, i), (self.vocabulary,))
                    chosen.append(int(logits.argmax()))
        return chosen


class LlamaCpp:
    def __init__(self, start: Start) -> None:
        api.llama_backend_init()
        self.start = start
        self.models = {name: _load(path) for name in FORMATS if (path := gguf_path(start, name)).exists()}
        if not self.models:
            raise FileNotFoundError(f"no GGUF file of {start.model} in {start.cache}; run with --setup")
        self.contexts: dict[tuple[Any, ...], Context] = {}
        self.best: dict[str, str] = {}
        for kind, streams, length in (("one", 1, 32), ("many", 8, 32), ("prompt", 1, 512)):
            self.best[kind] = min(self.models, key=lambda name: self._probe(name, kind, streams, length))
        self._close()

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Times:
        kind = _kind(len(prompts), new_tokens)
        return self._generate(self.best[kind], prompts, new_tokens)

    def note(self, workload: Workload) -> str:
        return self.best[_kind(workload.streams, workload.new)]

    def _probe(self, name: str, kind: str, streams: int, length: int) -> float:
        prompts = [token_ids(f"probe {i}", length, plain_ids(self.start.vocabulary)) for i in range(streams)]
        times = self._generate(name, prompts, 8 if kind != "prompt" else 1)[0]
        return times[-1] - times[0] if kind != "prompt" else times[0]

    def _generate(self, name: str, prompts: list[list[int]], new_tokens: int) -> Times:
        shared = _shared(prompts)
        context = self._context(name, prompts, shared, new_tokens)
        memory = api.llama_get_memory(context.pointer)
        began = time.perf_counter()
        rows: list[tuple[int, int, int, bool]] = []
        for sequence, prompt in enumerate(prompts):
            last = len(prompt) - 1
            reused = min(_common(context.held[sequence], prompt), last)
            if reused < shared and sequence:
                api.llama_memory_seq_rm(memory, sequence, -1, -1)
                api.llama_memory_seq_cp(memory, 0, sequence, 0, shared)
                reused = shared
            else:
                api.llama_memory_seq_rm(memory, sequence, reused, -1)
            if reused < shared:  # the first sequence: what the others will be given must be there before
                context.decode([(prompt[p], p, 0, False) for p in range(reused, shared)])
                reused = shared
            context.held[sequence] = prompt
            rows += [(prompt[p], p, sequence, p == last) for p in range(reused, len(prompt))]
        times: list[float] = []
        tokens = context.decode(rows)
        times.append(time.perf_counter() - began)
        for step in range(new_tokens - 1):
            tokens = context.decode([(t, len(prompts[s]) + step, s, True) for s, t in enumerate(tokens)])
            times.append(time.perf_counter() - began)
        return [times] * len(prompts)

    def _context(self, name: str, prompts: list[list[int]], shared: int, new_tokens: int) -> Context:
        """One per format, number of streams and number of cells."""
        streams, longest = len(prompts), max(map(len, prompts)) + new_tokens
        # One buffer for all where they share a prefix: it is held once. Apart otherwise: no masked reads.
        cells = shared + streams * (longest - shared) if shared else streams * _rounded_up(longest)
        key = (name, streams, cells)
        if key not in self.contexts:
            params = api.llama_context_default_params()
            params.n_ctx = _rounded_up(cells)
            params.n_batch, params.n_ubatch = N_BATCH, 512
            params.n_seq_max = streams
            params.n_threads = params.n_threads_batch = self.start.threads
            params.kv_unified = shared > 0
            pointer = api.llama_init_from_model(self.models[name], params)
            if not pointer:
                raise MemoryError(f"llama.cpp could not make a context of {cells} tokens")
            batch = api.llama_batch_init(N_BATCH, 0, 1)
            self.contexts[key] = Context(pointer, batch, [[] for _ in prompts], self.start.vocabulary)
        return self.contexts[key]

    def _close(self) -> None:
        for context in self.contexts.values():
            api.llama_batch_free(context.batch)
            api.llama_free(context.pointer)
        self.contexts.clear()


def gguf_path(start: Start, name: str) -> Path:
    return start.cache / "gguf" / f"{start.model.name}-{name}.gguf"


def _kind(streams: int, new_tokens: int) -> str:
    return "prompt" if new_tokens == 1 else "one" if streams == 1 else "many"


def _load(path: Path) -> Any:
    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp could not load {path}")
    return model


def _shared(prompts: list[list[int]]) -> int:
    """Tokens that all streams begin with, where that is worth sharing; 0 for one stream."""
    if len(prompts) == 1:
        return 0
    common = min(_common(prompts[0], prompt) for prompt in prompts)
    return min(common, min(map(len, prompts)) - 1) if common >= SHARED_FROM else 0


def _rounded_up(tokens: int) -> int:
    return -(-tokens // 256) * 256


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


if __name__ == "__main__":
    serve(LlamaCpp)
