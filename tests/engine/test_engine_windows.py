"""Sliding windows end to end: the same tokens, and only the blocks the windows still see."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Gemma2Config

from support.engines import GREEDY, generate, make_engine, run_all, tokens_of
from support.models import save_byte_tokenizer, save_tiny_model

WINDOW = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        eos_token_id=256,
        bos_token_id=None,
    )
    return save_byte_tokenizer(save_tiny_model(folder, config))


def test_shared_prefixes_small_pools_and_chunks_change_no_token(folder: Path) -> None:
    rng = random.Random(3)
    system = [rng.randrange(256) for _ in range(70)]
    prompts = [
        (system if rng.random() < 0.7 else []) + [rng.randrange(256) for _ in range(rng.randrange(1, 60))]
        for _ in range(40)
    ]
    params = replace(GREEDY, max_tokens=20)
    plain = make_engine(folder, enable_prefix_caching=False, max_num_seqs=1)
    expected = [generate(plain, prompt, params) for prompt in prompts]
    for num_blocks, block_size, chunk in ((200, 16, 512), (70, 4, 13), (44, 8, 32)):
        engine = make_engine(
            folder,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=8,
            max_num_batched_tokens=chunk,
            max_model_len=160,
        )
        for i, prompt in enumerate(prompts):
            engine.add(str(i), prompt, params)
        made = run_all(engine)
        assert [tokens_of(made[str(i)]) for i in range(len(prompts))] == expected
        assert engine.stats.prefix_hits > 0
        assert engine.cache.num_active == 0


def test_a_long_request_holds_the_whole_context_once_and_the_window_once(folder: Path) -> None:
    engine = make_engine(folder, num_blocks=200, block_size=8, enable_prefix_caching=False, max_num_batched_tokens=64)
    engine.add("long", [1] * 400, replace(GREEDY, max_tokens=40))
    while engine.has_work:
        engine.step()
        length = max((len(r.tokens) for r in engine.scheduler.running), default=0)
        full = -(-length // 8)
        in_flight = 64  # tokens of one step lie in blocks before the window lets go of them
        assert engine.cache.num_active <= full + -(-(WINDOW - 1 + in_flight) // 8) + 1
    assert engine.cache.num_free == 200


def test_a_pool_that_holds_one_long_request_only_because_of_windows(folder: Path) -> None:
    """480 tokens take 60 blocks in the full group and at most 12 in the windowed one."""
    engine = make_engine(folder, num_blocks=72, block_size=8, max_model_len=480, max_num_batched_tokens=64)
    engine.add("long", list(range(200)) * 2, replace(GREEDY, max_tokens=60))
    assert len(tokens_of(run_all(engine)["long"])) == 60
