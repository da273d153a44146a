"""A real engine whose tokens are bytes, so that a prompt's text and its tokens have the same positions."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anaphora.engine.engine import Engine
from anaphora.engine.params import SamplingParams
from anaphora.explain.outcome import Miss, Outcome
from support.engines import make_engine
from support.models import tiny_llama

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), max_position=8192)


class Asked:
    """An engine, asked one prompt after the other."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._count = 0

    def __call__(self, text: str, *, salt: str | None = None, params: SamplingParams = ONE) -> Outcome:
        self._count += 1
        name = f"r{self._count}"
        self.engine.add(name, self.ids(text), params, cache_salt=salt)
        end = time.monotonic() + 60
        while self.engine.has_work:
            self.engine.step()
            self.engine.cache.check_invariants()
            assert time.monotonic() < end
        return self.outcome(name)

    def miss(self, text: str, **more: Any) -> Miss:
        miss = self(text, **more).miss
        assert miss is not None
        return miss

    def ids(self, text: str) -> list[int]:
        return self.engine.tokenizer.encode(text, add_special_tokens=False)

    def outcome(self, name: str) -> Outcome:
        found = self.engine.explainer.outcomes.get(name)
        assert found is not None
        return found


@pytest.fixture
def ask(tiny: Path) -> Callable[..., Asked]:
    """Function: a new engine with the given settings."""

    def make(**settings: Any) -> Asked:
        return Asked(make_engine(tiny, **{"num_blocks": 256, "max_model_len": 2048, **settings}))

    return make
