"""transformers, its plain forward pass (no compilation, SDPA attention) with a cache kept from call to call."""

from __future__ import annotations

import time

import torch
from benchmarks.peers.worker import Start, Times, Unsupported, serve
from benchmarks.peers.workload import Workload
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

MOST_KV_BYTES = 3 << 30


class Eager:
    def __init__(self, start: Start) -> None:
        self.dtype = torch.bfloat16 if start.fast_bfloat16 else torch.float32
        torch.set_num_threads(start.threads)
        self.model = AutoModelForCausalLM.from_pretrained(start.model, dtype=self.dtype).eval()
        config = AutoConfig.from_pretrained(start.model)
        heads = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
        self.token_bytes = 2 * config.num_hidden_layers * heads * self.dtype.itemsize
        self.held: dict[int, tuple[list[list[int]], DynamicCache]] = {}
        """By number of streams: the tokens whose keys and values the cache holds."""

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> Times:
        length = len(prompts[0])
        needed = len(prompts) * (length + new_tokens) * self.token_bytes
        if needed > MOST_KV_BYTES:
            raise Unsupported(f"each stream holds keys and values of its own: {needed / 1e9:.1f} GB")
        began = time.perf_counter()
        held, cache = self.held.pop(len(prompts), ([[] for _ in prompts], DynamicCache()))
        reused = min(_common(a, b) for a, b in zip(held, prompts, strict=True))
        reused = min(reused, length - 1)
        cache = cache if reused else DynamicCache()
        if reused:
            cache.crop(reused - cache.get_seq_length())
        tokens = torch.tensor(prompts)[:, reused:]
        times = []
        for _ in range(new_tokens):
            logits = self.model(tokens, cache=cache, use_cache=True, logits_to_keep=1).logits
            tokens = logits[:, -1].argmax(-1, keepdim=True)
            times.append(time.perf_counter() - began)
        self.held[len(prompts)] = prompts, cache
        return [times] * len(prompts)

    def note(self, workload: Workload) -> str:
        return str(self.dtype).removeprefix("torch.")


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


if __name__ == "__main__":
    serve(Eager)
