"""Tiers behind the engine's pool: the same tokens, whatever comes from where, and nothing leaks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Gemma2Config

from anaphora.engine.engine import Engine
from anaphora.engine.tiering.prefill import PrefillEstimate
from anaphora.errors import ConfigError
from anaphora.tiers.break_even import PrefillSpeed
from support.engines import GREEDY, generate, make_engine, tokens_of
from support.models import save_byte_tokenizer, save_tiny_model, tiny_llama
from support.remote import valkey

SLOW = PrefillSpeed(0.05)
"""As of a model that is worth loading for: the tiny ones compute faster than any tier loads."""
Tokens = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 2 of four layers, every other one with a window."""
    folder = tmp_path_factory.mktemp("windows")
    config = Gemma2Config(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        sliding_window=24,
        query_pre_attn_scalar=8,
        eos_token_id=256,
        bos_token_id=None,
    )
    return save_byte_tokenizer(save_tiny_model(folder, config))


@pytest.fixture(autouse=True)
def computing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
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


def run(engine: Engine, *, each_step: Callable[[], None] = lambda: None) -> Tokens:
    """Step until nothing is left, checking the blocks; tokens by request."""
    made: dict[str, list[int]] = {}
    end = time.monotonic() + 60
    while engine.has_work:
        for output in engine.step():
            made.setdefault(output.request_id, []).extend(output.token_ids)
        engine.cache.check_invariants()
        each_step()
        assert time.monotonic() < end
        if engine.patience() != 0:
            time.sleep(0.0005)
    return {request: tuple(tokens) for request, tokens in made.items()}


def ask(engine: Engine, name: str, prompt: list[int], n: int = 8) -> None:
    engine.add(name, prompt, replace(GREEDY, max_tokens=n))


def drain(engine: Engine) -> None:
    assert engine.tiers is not None
    assert engine.tiers.wait(20)


def prompts_of(seed: int, count: int, length: int = 150) -> list[list[int]]:
    """Half of them share their first 64 tokens with some other."""
    rng = random.Random(seed)
    stems = [[rng.randrange(256) for _ in range(64)] for _ in range(4)]
    return [
        (rng.choice(stems) if rng.random() < 0.5 else []) + [rng.randrange(256) for _ in range(rng.randrange(20, 86))]
        for _ in range(count)
    ]


def prefix(seed: int, length: int) -> list[int]:
    return [random.Random(seed + i).randrange(256) for i in range(length)]


# The same tokens


@pytest.mark.parametrize("policy", ["write-through", "on-eviction"])
@pytest.mark.parametrize("tiers", ["ram", "disk", "remote", "ram disk", "disk remote", "ram disk remote"])
@pytest.mark.parametrize("model", ["llama", "windows"])
def test_the_same_tokens_with_every_combination(
    folder: Path, windowed: Path, tmp_path: Path, model: str, tiers: str, policy: str
) -> None:
    """The pool holds two requests; everything is asked for twice, so that what was evicted comes back from a tier."""
    if policy == "on-eviction" and "ram" not in tiers:
        pytest.skip("goes through RAM")
    path = folder if model == "llama" else windowed
    prompts = prompts_of(5, 12)
    plain = make_engine(path, enable_prefix_caching=False, max_num_seqs=1)
    expected = [generate(plain, prompt, replace(GREEDY, max_tokens=8)) for prompt in prompts]
    with valkey() if "remote" in tiers else nullcontext() as server:
        given: dict[str, dict[str, object]] = {
            "ram": {"ram_cache": 1 << 20},
            "disk": {"disk_cache": f"{tmp_path}:8MiB"},
            "remote": {"remote_cache": f"valkey://127.0.0.1:{server.port if server else 0}/0"},
        }
        settings: dict[str, object] = {"cache_write_policy": policy}
        for tier in tiers.split():
            settings |= given[tier]
        with engine_of(path, num_blocks=40, max_num_seqs=4, max_model_len=192, **settings) as engine:
            for _ in range(2):
                for i, prompt in enumerate(prompts):
                    ask(engine, str(i), prompt)
                made = run(engine)
                assert [made[str(i)] for i in range(len(prompts))] == expected
                drain(engine)
            sources = engine.stats.source_tokens
            assert sum(sources.get(tier, 0) for tier in tiers.split()) > 100, sources
            assert engine.stats.evictions
