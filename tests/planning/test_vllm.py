"""vLLM's capacity arithmetic: equal to vLLM 0.32's own code, to the block."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.errors import ConfigError, UnsupportedModel
from anaphora.geometry.model import ModelGeometry
from anaphora.planning.protocol import EngineSettings
from anaphora.planning.vllm import VllmMemory
from anaphora.planning.vllm_specs import token_bytes
from support.facts import Fact, Row, facts

AVAILABLE = 16 << 30
VLLM = VllmMemory()
GOLDEN = Path(__file__).parents[3] / "shared" / "data" / "model_configs"
SWITCH = {"default": None, "on": True, "off": False}


def settings_of(row: Row) -> EngineSettings:
    return EngineSettings(
        max_model_len=row.max_model_len,
        tensor_parallel_size=row.tp,
        kv_cache_dtype=row.kv_cache_dtype,
        device=row.device,
        max_num_batched_tokens=row.max_num_batched_tokens,
        enable_prefix_caching=SWITCH[row.prefix_caching],
    )


@pytest.mark.parametrize("fact", facts(), ids=lambda fact: fact.model)
def test_capacity_equals_vllms_own(fact: Fact) -> None:
    geometry = ModelGeometry.from_config(fact.config)
    assert fact.rows
    for row in fact.rows:
        found = VLLM.capacity(geometry, settings_of(row), row.available_bytes)
        assert (
            found.num_blocks,
            found.block_bytes,
            found.block_size,
            found.tokens,
            found.reuse_step,
            found.request_bytes,
        ) == (row.num_blocks, row.block_bytes, row.block_size, row.tokens, row.reuse_step, row.request_bytes), row


@cache
def golden_rows() -> list[dict[str, Any]]:
    lines = (GOLDEN / "golden.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.skipif(not GOLDEN.exists(), reason="needs ../shared/data/model_configs/golden.jsonl beside the checkout")
def test_every_golden_row() -> None:
    geometries: dict[str, ModelGeometry] = {}
    tps: dict[str, set[int]] = {}
    for row in golden_rows():
        name = row["model"]
        if name not in geometries:
            geometries[name] = ModelGeometry.from_config(GOLDEN / name.replace("/", "__"))
        geometry = geometries[name]
        tps.setdefault(name, set()).update([row["tp"]] if row["platform"] == "cuda" else [])
        asked = EngineSettings(
            max_model_len=row["max_model_len"],
            tensor_parallel_size=row["tp"],
            kv_cache_dtype=row["kv_cache_dtype"],
            device=row["platform"],
            max_num_batched_tokens=row.get("max_num_batched_tokens"),
            enable_prefix_caching=SWITCH[row["apc"]],
        )
        found = VLLM.capacity(geometry, asked, row["available_bytes"])
        assert found.num_blocks == row["num_blocks"], row
        assert found.block_bytes == row["pool_bytes_per_block"], row
        assert found.block_size == row["block_size"], row
        assert found.tokens == row["kv_cache_size_tokens"], row
        assert found.tokens_older == row["legacy_kv_cache_size_tokens"], row
        assert found.reuse_step == row["cache_hit_alignment_tokens"], row
        assert found.request_bytes == row["max_request_bytes_at_max_len"], row
        assert round(found.max_concurrency, 4) == row["max_concurrency"], row
        assert len(found.groups) == len(row["groups"]), row
        if "enable_prefix_caching" in row:
            assert VLLM.prefix_caching(geometry, asked) == row["enable_prefix_caching"]
            assert VLLM.in_flight_tokens(geometry, asked) == row["max_in_flight_tokens"]
        if row["tp"] == 1 and row["apc"] == "default":
            for length, expected in row["request_at_len"].items():
                at = VLLM.capacity(geometry, replace(asked, max_model_len=int(length)), row["available_bytes"])
                assert (at.blocks_per_request, at.request_bytes) == (expected["blocks"], expected["bytes"]), row
    for name, good in tps.items():  # the splits that vLLM refuses are refused here
        for tp in {1, 2, 4, 8} - good:
            with pytest.raises(ConfigError, match="tensor parallelism"):
                VLLM.capacity(geometries[name], EngineSettings(4096, tensor_parallel_size=tp), AVAILABLE)


def test_worked_example_qwen() -> None:
    """24 GB card, 6 GiB for KV: 57,344 bytes a token, blocks of 16."""
    geometry = ModelGeometry.from_catalog("Qwen/Qwen2.5-7B-Instruct")
    found = VLLM.capacity(geometry, EngineSettings(32768), 6 << 30)
    assert found.block_bytes == 16 * 57344
    assert found.num_blocks == (6 << 30) // (16 * 57344) == 7021
    assert found.request_bytes == 1_879_048_192  # 1.75 GiB
    assert found.max_concurrency == 7021 / 2048
    assert found.reuse_step == 16


def test_longest_context_fits_and_one_more_does_not() -> None:
    for name in ("Qwen/Qwen2.5-7B-Instruct", "google/gemma-3-27b-it", "Qwen/Qwen3.5-9B", "openai/gpt-oss-20b"):
        geometry = ModelGeometry.from_catalog(name)
        asked = EngineSettings(1 << 20)
        longest = VLLM.longest_context(geometry, asked, 4 << 30)
        assert 0 < longest < 1 << 20
        assert VLLM.capacity(geometry, replace(asked, max_model_len=longest), 4 << 30).fits_one_request
        assert not VLLM.capacity(geometry, replace(asked, max_model_len=longest + 1), 4 << 30).fits_one_request
    assert VLLM.longest_context(geometry, asked, 1000) == 0


def test_pipeline_stages_take_their_share() -> None:
    geometry = ModelGeometry.from_catalog("Qwen/Qwen2.5-7B-Instruct")  # 28 layers: 9 + 10 + 9
    one, three = (VLLM.capacity(geometry, EngineSettings(4096, pipeline_parallel_size=n), 1 << 30) for n in (1, 3))
    assert three.block_bytes == one.block_bytes * 10 // 28
    assert three.num_blocks > 2 * one.num_blocks


def test_what_prefix_caching_costs_a_hybrid() -> None:
    """README's figure: a prefix shorter than one block of 528 tokens is never reused; states are kept twice."""
    geometry = ModelGeometry.from_catalog("Qwen/Qwen3.5-9B")
    on = VLLM.capacity(geometry, EngineSettings(32768), AVAILABLE)
    off = VLLM.capacity(geometry, EngineSettings(32768, enable_prefix_caching=False), AVAILABLE)
    assert on.reuse_step == 528
    assert {group.blocks_per_request for group in on.groups if group.keeps == "state"} == {2}
    assert {group.blocks_per_request for group in off.groups if group.keeps == "state"} == {1}


def test_latent_block_by_generation() -> None:
    geometry = ModelGeometry.from_catalog("deepseek-ai/DeepSeek-V3")
    sizes = {
        (capability, dtype): VLLM.capacity(
            geometry, EngineSettings(4096, compute_capability=capability, kv_cache_dtype=dtype), AVAILABLE
        ).block_size
        for capability in (90, 100, 120)
        for dtype in ("auto", "fp8")
    }
    assert sizes == {
        (90, "auto"): 16,
        (90, "fp8"): 64,
        (100, "auto"): 32,
        (100, "fp8"): 32,
        (120, "auto"): 16,
        (120, "fp8"): 16,
    }


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", 512),
        ("bfloat16", 512),
        ("fp8_e5m2", 256),
        ("nvfp4", 2 * (64 + 8)),
        ("int8_per_token_head", 256 + 8),
        ("int4_per_token_head", 128 + 8),
    ],
)
def test_bytes_of_a_token_and_head(dtype: str, expected: int) -> None:
    assert token_bytes(128, 128, dtype, 2) == expected


def test_what_cannot_be_is_refused_with_what_would_do() -> None:
    geometry = ModelGeometry.from_catalog("Qwen/Qwen2.5-7B-Instruct")
    with pytest.raises(ConfigError, match=r"28 attention heads.*over 8 does not divide\. Use one of 1, 2, 4"):
        VLLM.capacity(geometry, EngineSettings(4096, tensor_parallel_size=8), AVAILABLE)
    with pytest.raises(ConfigError, match="kv_cache_dtype 'q4' is not known; vLLM has auto"):
        VLLM.capacity(geometry, EngineSettings(4096, kv_cache_dtype="q4"), AVAILABLE)
    with pytest.raises(ConfigError, match="max_model_len is 0"):
        EngineSettings(0)
    with pytest.raises(ConfigError, match="block_size is -1"):
        EngineSettings(1, block_size=-1)
    with pytest.raises(UnsupportedModel, match=r"cross attention .*anaphora kv"):
        VLLM.capacity(ModelGeometry.from_catalog("openai/whisper-large-v3"), EngineSettings(448), AVAILABLE)


@settings(max_examples=60, deadline=None)
@given(
    fact=st.sampled_from(facts()),
    length=st.integers(1, 40000),
    more=st.integers(1, 5000),
    available=st.integers(1 << 30, 1 << 36),
    batched=st.integers(1, 16384),
)
def test_monotone(fact: Fact, length: int, more: int, available: int, batched: int) -> None:
    """A longer request never takes fewer blocks, more memory never gives fewer, and nothing beats the naive formula
    by more than what windows and states save."""
    geometry = ModelGeometry.from_config(fact.config)
    asked = EngineSettings(length, max_num_batched_tokens=batched)
    short = VLLM.capacity(geometry, asked, available)
    long = VLLM.capacity(geometry, replace(asked, max_model_len=length + more), available)
    richer = VLLM.capacity(geometry, asked, available + (more << 20))
    assert long.blocks_per_request >= short.blocks_per_request
    assert richer.num_blocks >= short.num_blocks
    assert short.request_bytes >= geometry.sequence_bytes(length)
