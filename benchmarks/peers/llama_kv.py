"""What llama.cpp's quantised KV caches lose, by its own code: teacher-forced, against its own bfloat16 cache.

Run by benchmarks/formats_llama.py in llama.cpp's environment. One command on stdin, {"gguf": path, "texts": [[token
ids], ...], "pairs": [[keys, values], ...]} with names of ggml types; one answer, {"rows": [...]} in their order.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api  # type: ignore[import-not-found, unused-ignore]

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}
"""Numbers of ggml's types (ggml.h); the binding does not name all of them."""
FLASH = 1
"""LLAMA_FLASH_ATTN_TYPE_ENABLED: quantised values need it, so all have it."""


def log_probabilities(model: Any, vocabulary: int, text: list[int], keys: str, values: str, threads: int) -> Any:
    """float32 [tokens, vocabulary], natural logarithms."""
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = len(text)
    params.n_ubatch, params.n_seq_max = 512, 1
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type, params.type_k, params.type_v = FLASH, TYPES[keys], TYPES[values]
    context = api.llama_init_from_model(model, params)
    if not context:
        raise MemoryError(f"llama.cpp could not make a context with {keys} keys and {values} values")
    batch = api.llama_batch_init(len(text), 0, 1)
    try:
        batch.n_tokens = len(text)
        for i, token in enumerate(text):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, True
            batch.seq_id[i][0] = 0
        if code := api.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        logits = np.ctypeslib.as_array(api.llama_get_logits(context), (len(text), vocabulary)).copy()
    finally:
        api.llama_batch_free(batch)
        api.llama_free(context)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits


def main() -> None:
    command = json.loads(sys.stdin.readline())
    api.llama_backend_init()
    model = api.llama_model_load_from_file(command["gguf"].encode(), api.llama_model_default_params())
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    kl: list[list[Any]] = [[] for _ in command["pairs"]]
    same: list[list[Any]] = [[] for _ in command["pairs"]]
    for text in command["texts"]:
        wanted = log_probabilities(model, vocabulary, text, "bf16", "bf16", command["threads"])
        for i, (keys, values) in enumerate(command["pairs"]):
            got = log_probabilities(model, vocabulary, text, keys, values, command["threads"])
            kl[i].append((np.exp(wanted) * (wanted - got)).sum(axis=1))
            same[i].append(wanted.argmax(axis=1) == got.argmax(axis=1))
    rows = []
    for i, (keys, values) in enumerate(command["pairs"]):
        all_kl = np.concatenate(kl[i])
        rows.append(
            {
                "keys": keys,
                "values": values,
                "mean": float(all_kl.mean()),
                "p99": float(np.quantile(all_kl, 0.99)),
                "top1": float(np.concatenate(same[i]).mean()),
            }
        )
    print(json.dumps({"rows": rows}), flush=True)


if __name__ == "__main__":
    main()
