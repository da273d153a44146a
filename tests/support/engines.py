"""Engines for tests, and a way to run requests through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from anaphora.engine.build import Startup, load, prepare
from anaphora.engine.config import UserConfig
from anaphora.engine.engine import Engine
from anaphora.engine.params import RequestOutput, SamplingParams
from anaphora.engine.sources.resolve import resolve_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def make_engine(folder: Path, *, num_blocks: int | None = None, **settings: object) -> Engine:
    """A real engine in float32 on the CPU; `num_blocks` sets the pool exactly."""
    user = UserConfig(dtype="float32", device="cpu", kv_memory=256 << 20)
    prepared = prepare(resolve_model(str(folder)), replace(user, **settings))  # type: ignore[arg-type]
    if num_blocks is not None:
        user = replace(user, kv_memory=num_blocks * prepared.config.block_bytes)
        prepared = prepare(resolve_model(str(folder)), replace(user, **settings))  # type: ignore[arg-type]
        assert prepared.config.num_blocks == num_blocks
    return load(prepared, Startup())


def run_all(engine: Engine) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left; outputs by request id."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.cache.check_invariants()
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.token_ids)


def generate(engine: Engine, prompt: Sequence[int], params: SamplingParams = GREEDY) -> tuple[int, ...]:
    """One request alone."""
    engine.add("alone", prompt, params)
    return tokens_of(run_all(engine)["alone"])
