"""What explaining every request costs: the same requests with the explainer and without, turn by turn in one process.

python benchmarks/explain.py [MODEL] [--rounds N]

Two engines on the same weights run the same list of prompts: misses that part at a timestamp (the dearest case: text is
read), misses of new text, hits, and evictions, for the pool is too small for all. The engines take turns, the order
swapped every round; reported is the median of the paired ratios of time, and the share of it that was measured inside.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anaphora.engine.build import Startup, load, prepare
from anaphora.engine.config import UserConfig
from anaphora.engine.engine import Engine
from anaphora.engine.params import SamplingParams
from anaphora.engine.sources.resolve import resolve_model
from anaphora.explain.explainer import Explainer

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
RULES = "You are a helpful assistant. Answer briefly, and say so when you do not know. " * 12


class Silent:
    """In the explainer's place: does nothing."""

    def admitted(self, *_: Any) -> SimpleNamespace:
        return SimpleNamespace(miss=None)

    def finished(self, *_: Any) -> None: ...

    def reset(self) -> None: ...


class Timed:
    """The explainer, and the seconds spent in it."""

    def __init__(self, inner: Explainer) -> None:
        self.inner, self.seconds = inner, 0.0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        def timed(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*given)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def prompts(seed: int, engine: Engine) -> list[list[int]]:
    draw = random.Random(seed)
    texts = []
    for _ in range(4):
        clock = f"Now: 2026-11-29 {draw.randrange(24):02d}:{draw.randrange(60):02d}:{draw.randrange(60):02d}. "
        words = " ".join(draw.choice(("red", "blue", "green", "deep", "high")) for _ in range(200))
        texts += [RULES + clock + RULES, words, RULES + words[:40]]
    return [engine.tokenizer.encode(text) for text in texts]


def turn(engine: Engine, wanted: list[list[int]], name: str) -> float:
    began = time.perf_counter()
    for number, prompt in enumerate(wanted):
        engine.add(f"{name}-{number}", prompt, PARAMS)
        while engine.has_work:
            engine.step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    user = UserConfig(device="cpu", max_model_len=1024, threads=options.threads, eviction_policy="lru")
    prepared = prepare(resolve_model(options.model), user)
    prepared = prepare(resolve_model(options.model), replace(user, kv_memory=160 * prepared.config.block_bytes))
    with_it, without = (load(prepared, Startup()) for _ in range(2))
    timed = Timed(with_it.explainer)
    with_it.explainer = timed  # type: ignore[assignment]
    without.cache._pool.evict_listeners.clear()
    without.explainer = Silent()  # type: ignore[assignment]
    ratios, shares, calls, requests = [], [], [], 0
    for number in range(options.rounds + 1):
        wanted = prompts(number, with_it)
        spent, timed.seconds = {}, 0.0
        for engine in ((with_it, without), (without, with_it))[number % 2]:
            spent[engine] = turn(engine, wanted, str(number))
        if number:  # the first round warms up
            ratios.append(spent[with_it] / spent[without])
            shares.append(timed.seconds / spent[with_it])
            calls.append(timed.seconds / len(wanted))
            requests += len(wanted)
    causes = {str(cause): tokens for cause, tokens in with_it.stats.missed_tokens.items()}
    print(f"{requests} requests, {Path(options.model).name}; missed tokens by cause: {causes}")
    middle, pairs = statistics.median(ratios), len(ratios)
    print(f"time with / without: median {middle:.4f} of {pairs} pairs ({min(ratios):.3f} .. {max(ratios):.3f})")
    each = statistics.median(calls)
    print(f"spent in the explainer: {statistics.median(shares):.3%} of the time, {each * 1e6:.0f} us per request")


if __name__ == "__main__":
    main()
