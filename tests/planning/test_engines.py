"""Memory models of SGLang, llama.cpp, Ollama, transformers and our own pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.engine.config import Machine, UserConfig, resolve
from anaphora.errors import ConfigError, UnsupportedModel
from anaphora.geometry.catalog import find_model
from anaphora.geometry.model import ModelGeometry
from anaphora.planning.anaphora_pool import AnaphoraMemory
from anaphora.planning.ask import Wishes, ask
from anaphora.planning.engines import ENGINES, find_engine
from anaphora.planning.llama_cpp import LlamaCppMemory, OllamaMemory
from anaphora.planning.overhead import Situation
from anaphora.planning.overhead_engines import anaphora_budget
from anaphora.planning.plan import answer
from anaphora.planning.protocol import EngineSettings
from anaphora.planning.sglang import SglangMemory
from anaphora.planning.transformers_cb import TransformersMemory

GIB = 1 << 30
QWEN = ModelGeometry.from_catalog("Qwen/Qwen2.5-7B-Instruct")
GPT_OSS = ModelGeometry.from_catalog("openai/gpt-oss-20b")


def test_sglang_plain_model_pages() -> None:
    """Tokens are the bytes over 57,344, down to a whole page."""
    one = SglangMemory().capacity(QWEN, EngineSettings(32768), 7 * GIB)
    assert one.tokens == one.num_blocks == 7 * GIB // 57344 == 131_072
    paged = SglangMemory().capacity(QWEN, EngineSettings(32768, block_size=64), 7 * GIB + 57344 * 63)
    assert (paged.tokens, paged.block_bytes, paged.reuse_step) == (131_072, 64 * 57344, 64)
    halves = SglangMemory().capacity(QWEN, EngineSettings(32768, tensor_parallel_size=2), 7 * GIB)
    assert halves.tokens == 2 * one.tokens


def test_sglang_report() -> None:
    """A public log: Llama-3.1-8B on an H100, 2 x 27.13 GiB, 444,500 tokens."""
    llama = ModelGeometry.from_catalog("meta-llama/Meta-Llama-3.1-8B-Instruct")
    assert SglangMemory().capacity(llama, EngineSettings(131072), 444_500 * 131_072).tokens == 444_500


def test_sglang_two_pools() -> None:
    """gpt-oss: 12 full and 12 sliding layers of 2,048 bytes a token; sliding ones keep 0.8 of the tokens."""
    found = SglangMemory().capacity(GPT_OSS, EngineSettings(32768), 10 * GIB)
    assert found.tokens == 10 * GIB * 10 // (24576 * 18)
    full, sliding = found.groups
    assert (full.layers, full.pool_blocks, sliding.layers) == (12, None, 12)
    assert sliding.pool_blocks == found.tokens * 8 // 10
    assert sliding.blocks_per_request == 128 + 1
    gemma = ModelGeometry.from_catalog("google/gemma-2-9b-it")  # not on SGLang's list: every layer keeps everything
    assert SglangMemory().capacity(gemma, EngineSettings(8192), GIB).block_bytes == gemma.bytes_per_token(2)


def test_sglang_states_take_nine_nineteenths() -> None:
    geometry = ModelGeometry.from_catalog("Qwen/Qwen3-Next-80B-A3B-Instruct")
    found = SglangMemory().capacity(geometry, EngineSettings(32768), 40 * GIB)
    full, state = found.groups
    assert state.pool_blocks is not None
    per_state = geometry.state_bytes(2)
    assert state.pool_blocks == (40 * GIB * 9 // 19 - per_state) // per_state
    assert found.tokens == (40 * GIB - (state.pool_blocks + 1) * per_state) // geometry.bytes_per_token(2)
    assert (full.layers, state.blocks_per_request) == (12, 3)
    assert found.max_concurrency == min(found.tokens / 32768, state.pool_blocks / 3)


def test_sglang_latent_is_not_divided() -> None:
    geometry = ModelGeometry.from_catalog("deepseek-ai/DeepSeek-V3")
    found = SglangMemory().capacity(geometry, EngineSettings(4096, tensor_parallel_size=8), 10 * GIB)
    assert found.block_bytes == 70_272


@pytest.mark.parametrize(
    ("name", "context", "dtype", "gib"),
    [  # KV buffers of public llama.cpp and Ollama logs
        ("Qwen/Qwen2.5-Coder-32B-Instruct", 32768, "auto", 8.0),
        ("Qwen/Qwen3-4B", 4096, "f16", 0.5625),
        ("mistralai/Mistral-Nemo-Instruct-2407", 4096, "f16", 0.625),
        ("Qwen/Qwen2.5-14B-Instruct", 32768, "f16", 6.0),
        ("Qwen/Qwen2.5-14B-Instruct", 32768, "q8_0", 6.0 * 17 / 32),
        ("Qwen/Qwen2.5-14B-Instruct", 32768, "q8_0/q4_0", 3.0 * (17 / 32 + 9 / 32)),
    ],
)
def test_llama_cpp_slots(name: str, context: int, dtype: str, gib: float) -> None:
    geometry = ModelGeometry.from_catalog(name)
    found = LlamaCppMemory().capacity(geometry, EngineSettings(context, kv_cache_dtype=dtype), 20 * GIB)
    assert found.block_bytes == gib * GIB
    assert found.num_blocks == 20 * GIB // found.block_bytes


def test_llama_cpp_windows() -> None:
    """gpt-oss, 56,064 cells: 1.2832 GiB full; sliding layers 24 MiB when four slots share one cache (public log)."""
    memory, asked = LlamaCppMemory(), EngineSettings(56064)
    full, sliding, state = memory.slot_bytes(GPT_OSS, asked)
    assert full == 56064 * 12 * 2048
    assert sliding == 768 * 12 * 2048  # window 128 + micro-batch 512, up to 256
    assert state == 0
    assert memory.unified_sliding_bytes(GPT_OSS, asked, 4) == 24 << 20
    short = memory.slot_bytes(GPT_OSS, EngineSettings(300))
    assert short[1] == short[0] == 512 * 12 * 2048


def test_llama_cpp_states_are_float32() -> None:
    geometry = ModelGeometry.from_catalog("Qwen/Qwen3.5-9B")
    _, _, state = LlamaCppMemory().slot_bytes(geometry, EngineSettings(4096))
    elements = sum(
        a * b * (c[0] if c else 1) for layer in geometry.layers if layer.state for a, b, *c in layer.state.shapes()
    )
    assert state == 4 * elements


def test_ollama_has_three_types() -> None:
    assert OllamaMemory().capacity(QWEN, EngineSettings(4096, kv_cache_dtype="q8_0"), GIB).num_blocks > 0
    with pytest.raises(ConfigError, match=r"'q5_0' is not known to ollama; it has f16, q8_0, q4_0"):
        OllamaMemory().capacity(QWEN, EngineSettings(4096, kv_cache_dtype="q5_0"), GIB)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B-Instruct", "google/gemma-2-9b-it"])
@pytest.mark.parametrize("available", [3 * GIB, 17 * GIB + 12345])
def test_transformers_equals_its_own_planner(name: str, available: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sectors of the real PagedAttentionMemoryHandler, for the bytes it has once a batch is paid for."""
    from math import lcm

    import torch
    from transformers import AutoConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching import cache as module

    config = dict(find_model(name).config)
    real: Any = AutoConfig.for_model(**config)
    real._attn_implementation = "flash_attention_2"
    geometry = ModelGeometry.from_catalog(name)
    memory, asked = TransformersMemory(), EngineSettings(8192)
    page = memory.page_bytes(geometry, asked)
    kinds: dict[int | None, int] = {}
    for layer in geometry.layers:
        kinds[layer.window] = kinds.get(layer.window, 0) + 1
    sector = lcm(*(layers * page for layers in kinds.values()), 128)
    monkeypatch.setattr(module, "get_device_and_memory_breakdown", lambda: (None, available, 0, 0))
    handler = module.PagedAttentionMemoryHandler(
        config=real,
        cb_config=ContinuousBatchingConfig(
            max_memory_percent=1.0, max_batch_tokens=512, use_async_batching=True, max_blocks_per_request=0
        ),
        dtype=torch.bfloat16,
        bytes_per_sector=sector,
        tokens_per_sector=256 * sector // page // min(kinds.values()),
        bytes_per_block=len(geometry.layers) * page,
        attn_types=["full_attention", "sliding_attention"][: len(kinds)],
        model_supports_logits_to_keep=True,
    )
    batch, sectors = handler.infer_max_batch_tokens_and_num_sectors()
    left = available - (handler.fixed_overhead_bytes - handler.trash_bytes) - batch * handler.bytes_per_batch_token
    found = memory.capacity(geometry, asked, left)
    assert found.num_blocks == sectors
    assert found.block_bytes == handler.bytes_per_cache_sector
    assert found.reuse_step == (256 if len(kinds) == 1 else 0)


def serve_resolves(name: str, user: UserConfig, machine: Machine) -> Any:
    """What `anaphora serve` would print for a model of the catalogue."""
    geometry = ModelGeometry.from_catalog(name)
    assert geometry.parameters is not None
    config, blocks = resolve(
        user,
        model_path=Path("model"),
        model_name=name,
        model_config=dict(find_model(name).config),
        geometry=geometry,
        num_weights=geometry.parameters.total,
        has_spec=True,
        machine=machine,
    )
    return config, blocks.layout


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen2.5-7B-Instruct", "google/gemma-2-9b-it", "HuggingFaceTB/SmolLM2-135M-Instruct", "google/gemma-3-1b-it"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [1, 16, 128])
def test_our_pool_equals_what_serve_resolves(name: str, dtype: str, block: int) -> None:
    """To the block: half of what the weights leave, cut into blocks."""
    free = 57 * GIB + 1234567
    config, layout = serve_resolves(name, UserConfig(dtype=dtype, block_size=block), Machine("cpu", True, free))
    geometry = ModelGeometry.from_catalog(name)
    wishes = Wishes("epyc-genoa-64gb", context=config.max_model_len, engine="anaphora", dtype=dtype, block_size=block)
    question, _ = ask(name, geometry, wishes)
    question = replace(question, situation=replace(question.situation, free_bytes=free))
    budget = anaphora_budget(question.situation)
    assert budget.part("weights").likely == config.weight_bytes
    assert budget.available.likely == (free - config.weight_bytes) // 2
    found = question.engine.capacity(question.situation, budget.available.likely)
    assert found.num_blocks == config.num_blocks
    assert found.block_bytes == config.block_bytes
    assert found.tokens == config.num_blocks * config.block_size // len(layout.groups)
    assert found.blocks_per_request == layout.blocks_for(config.max_model_len, config.max_num_batched_tokens)
    assert answer(question).requests == config.num_blocks // found.blocks_per_request


@pytest.mark.model
def test_our_pool_equals_serve_on_the_real_model(smollm2: Path) -> None:
    """The whole of serve's preparation on the real folder, with a pool of 64 MiB."""
    from anaphora.engine.build import prepare
    from anaphora.engine.sources.resolve import ModelFolder

    pool = 64 << 20
    prepared = prepare(
        ModelFolder(smollm2, "smollm2", "folder"), UserConfig(kv_memory=pool, max_model_len=1024, device="cpu")
    )
    config = prepared.config
    width = 4 if config.dtype == "float32" else 2
    asked = EngineSettings(1024, model_dtype_bytes=width, device="cpu")
    found = AnaphoraMemory().capacity(ModelGeometry.from_config(smollm2), asked, pool)
    assert (found.num_blocks, found.block_bytes) == (config.num_blocks, config.block_bytes)
    assert config.kv_bytes == found.num_blocks * found.block_bytes <= pool
    geometry = ModelGeometry.from_config(smollm2)
    assert geometry.parameters is not None
    assert geometry.parameters.total * width == config.weight_bytes


def test_what_an_engine_cannot_do_is_refused_with_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"engine 'tgi' is not known; choose one of vllm, sglang"):
        find_engine("tgi")
    with pytest.raises(ConfigError, match="one device"):
        AnaphoraMemory().capacity(QWEN, EngineSettings(4096, tensor_parallel_size=2), GIB)
    with pytest.raises(ConfigError, match="power of two"):
        AnaphoraMemory().capacity(QWEN, EngineSettings(4096, block_size=48), GIB)
    with pytest.raises(ConfigError, match=r"'q8_0' is not known"):
        AnaphoraMemory().capacity(QWEN, EngineSettings(4096, kv_cache_dtype="q8_0"), GIB)
    with pytest.raises(ConfigError, match="no int8"):
        SglangMemory().capacity(QWEN, EngineSettings(4096, kv_cache_dtype="int8"), GIB)
    with pytest.raises(ConfigError, match="does not divide"):
        SglangMemory().capacity(QWEN, EngineSettings(4096, tensor_parallel_size=8), GIB)
    with pytest.raises(ConfigError, match="model's dtype"):
        TransformersMemory().capacity(QWEN, EngineSettings(4096, kv_cache_dtype="fp8"), GIB)
    hybrid = ModelGeometry.from_catalog("Qwen/Qwen3.5-9B")
    for memory in (TransformersMemory(), AnaphoraMemory()):
        with pytest.raises(UnsupportedModel, match=r"vLLM or llama\.cpp"):
            memory.capacity(hybrid, EngineSettings(4096), GIB)
    compressed = ModelGeometry.from_catalog("deepseek-ai/DeepSeek-V4-Pro")
    for other in (SglangMemory(), LlamaCppMemory()):
        with pytest.raises(UnsupportedModel, match="anaphora kv"):
            other.capacity(compressed, EngineSettings(4096), GIB)


@settings(max_examples=60, deadline=None)
@given(
    engine=st.sampled_from(sorted(ENGINES)),
    geometry=st.sampled_from([QWEN, GPT_OSS, ModelGeometry.from_catalog("google/gemma-3-27b-it")]),
    length=st.integers(1, 32000),
    more=st.integers(1, 700),
    available=st.integers(GIB, 60 * GIB),
)
def test_monotone(engine: str, geometry: ModelGeometry, length: int, more: int, available: int) -> None:
    """More memory never holds fewer, longer requests never more, and a request takes at least its keys and values."""
    memory = ENGINES[engine].memory
    asked = EngineSettings(length)
    now = memory.capacity(geometry, asked, available)
    longer = memory.capacity(geometry, replace(asked, max_model_len=length + more), available)
    richer = memory.capacity(geometry, asked, available + (more << 20))
    assert longer.max_concurrency <= now.max_concurrency
    assert richer.num_blocks >= now.num_blocks
    assert now.max_concurrency * geometry.sequence_bytes(length) <= available * 1.0001
    longest = memory.longest_context(geometry, replace(asked, max_model_len=1 << 17), available)
    at = memory.capacity(geometry, replace(asked, max_model_len=max(1, longest)), available)
    assert longest == 0 or at.max_concurrency >= 1


def test_situation_counts_ranks() -> None:
    question, _ = ask("x", QWEN, Wishes("rtx-4090", tp=2, pp=2, context=4096, engine="vllm"))
    assert isinstance(question.situation, Situation)
    assert question.situation.ranks == question.situation.devices == 4
