"""Engines with tiers, for tests: run to their end with the blocks checked, tokens by request."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from anaphora.engine.engine import Engine
from anaphora.engine.tiering.prefill import PrefillEstimate
from anaphora.tiers.break_even import PrefillSpeed
from support.engines import GREEDY, make_engine

SLOW = PrefillSpeed(0.05)
"""As of a model that is worth loading for: the tiny ones compute faster than any tier loads."""
Tokens = dict[str, tuple[int, ...]]


def make_computing_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine believes it computes at SLOW."""
    monkeypatch.setattr(PrefillEstimate, "speed", lambda self: SLOW)


@contextmanager
def engine_of(folder: Path, **settings: object) -> Iterator[Engine]:
    engine = make_engine(folder, **settings)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()
        engine.cache.check_invariants()
        assert engine.cache.num_active == 0


def run(engine: Engine) -> Tokens:
    """Step until nothing is left, checking the blocks; tokens by request."""
    made: dict[str, list[int]] = {}
    end = time.monotonic() + 60
    while engine.has_work:
        for output in engine.step():
            made.setdefault(output.request_id, []).extend(output.token_ids)
        engine.cache.check_invariants()
        assert time.monotonic() < end
        if engine.patience() != 0:
            time.sleep(0.0005)
    return {request: tuple(tokens) for request, tokens in made.items()}


def ask(engine: Engine, name: str, prompt: list[int], n: int = 8) -> None:
    engine.add(name, prompt, replace(GREEDY, max_tokens=n))


def drain(engine: Engine) -> None:
    assert engine.tiers is not None
    assert engine.tiers.wait(20)


def prefix(seed: int, length: int) -> list[int]:
    return [random.Random(seed + i).randrange(256) for i in range(length)]
