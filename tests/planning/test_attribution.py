"""Every token between plan and engine has a cause, and the causes add up."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.errors import ConfigError
from anaphora.geometry.find import find_geometry
from anaphora.planning.ask import Wishes, ask
from anaphora.planning.attribution import Attribution, Difference, attribute
from anaphora.planning.engine_report import GIB, MIB, EngineReport
from anaphora.planning.plan import Answer, answer
from anaphora.planning.start_log import read_log
from support.start_logs import start_log


@cache
def plan(model: str, engine: str, **wishes: Any) -> Answer:
    question, _ = ask(model, find_geometry(model), Wishes(engine=engine, **wishes))
    return answer(question)


def by_cause(found: Attribution) -> dict[str, Difference]:
    assert sum(item.tokens for item in found.differences) == found.reported_tokens - found.predicted_tokens
    return {item.cause: item for item in found.differences}


def test_vllm_with_every_part_told() -> None:
    planned = plan("Qwen/Qwen3-32B", "vllm", hardware="h100", count=2, context=16000, concurrency=8)
    found = attribute(planned, read_log(start_log("vllm_v1")))
    causes = by_cause(found)
    assert abs(found.error) < 0.02
    assert found.inside
    assert causes["setting engine version"].corrects == "plan with --engine-version 0.11"
    assert causes["setting max_num_seqs"].reported == "default"
    for part in ("weights", "activations", "libraries"):
        assert causes[part].within
    assert causes["block rounding"].within
    assert "not explained" not in causes


def test_vllm_with_parts_lumped_together_names_them_and_the_estimates_it_would_correct() -> None:
    log = (
        start_log("vllm_now")
        .partition("Graph capturing")[0]
        .replace("6.90 GiB", "4.90 GiB")
        .replace("129,184", "91,744")
    )
    planned = plan("Qwen/Qwen2.5-7B-Instruct", "vllm", hardware="rtx-4090", context=32768, concurrency=3)
    found = attribute(planned, read_log(log))
    rest = by_cause(found)["activations, libraries and graphs together (deduced)"]
    assert rest.within is False
    assert rest.tokens < -30000
    assert rest.corrects is not None
    assert "other processes" in rest.corrects
    assert not found.inside


def test_another_memory_size_and_share_are_settings() -> None:
    planned = plan("Qwen/Qwen2.5-7B-Instruct", "vllm", hardware="rtx-4090", context=32768, utilization=0.8)
    report = EngineReport(
        "vllm", "x", version="0.33.0", device_bytes=47 * GIB, utilization=0.9, num_blocks=30000, max_model_len=16384
    )
    causes = by_cause(attribute(planned, report))
    assert causes["setting device memory"].tokens > causes["setting gpu_memory_utilization"].tokens > 0
    assert causes["setting gpu_memory_utilization"].corrects == "plan with --utilization 0.9"
    assert causes["setting device memory"].corrects is None


def test_sglang_blames_what_was_not_free_at_the_start() -> None:
    planned = plan("meta-llama/Llama-3.1-8B-Instruct", "sglang", hardware="h100", context=131072, utilization=0.88)
    report = read_log(start_log("sglang_old").replace("avail mem=78.81", "avail mem=68.81"))
    report = replace(report, available_bytes=(report.available_bytes or 0) - int(8.8 * GIB), tokens=444500 - 72090)
    causes = by_cause(attribute(planned, report))
    other = causes["memory free at the start (other processes, CUDA context)"]
    assert other.kv_bytes == pytest.approx(-8.8 * GIB, rel=0.05)
    assert causes["libraries (deduced)"].within


def test_llama_cpp_is_compared_in_bytes() -> None:
    planned = plan("Qwen/Qwen2.5-14B-Instruct", "llama.cpp", hardware="rtx-3090", context=8192, quantization="q4_k_m")
    log = (
        "load_tensors:        CUDA0 model buffer size =  8148.38 MiB\n"
        "load_tensors:   CPU_Mapped model buffer size =   417.66 MiB\n"
        "llama_kv_cache: size = 6144.00 MiB ( 32768 cells,  48 layers,  1/1 seqs), "
        "K (f16): 3072.00 MiB, V (f16): 3072.00 MiB\n"
        "llama_context:      CUDA0 compute buffer size =   307.00 MiB\n"
    )
    found = attribute(planned, read_log(log))
    causes = by_cause(found)
    assert (causes["KV cache"].within, causes["KV cache"].kv_bytes) == (True, 0)
    assert (found.predicted_tokens, found.reported_tokens, found.inside) == (8192, 32768, True)
    assert causes["setting max_model_len"].corrects == "plan with --context 32768"
    assert causes["compute buffer"].within


def test_a_unified_cache_keeps_more_of_sliding_layers_and_says_so() -> None:
    """4 slots on one cache: 4 x 128 + 512 cells in place of 768, 12 layers of 2 KiB a cell."""
    planned = plan("openai/gpt-oss-20b", "llama.cpp", hardware="rtx-3090", context=56064)
    found = attribute(planned, read_log(start_log("llama_cpp")))
    cache = by_cause(found)["KV cache"]
    assert (cache.within, cache.kv_bytes) == (False, 256 * 12 * 2048)
    assert any("unified" in remark for remark in found.remarks)
    assert not found.inside


def test_one_more_block_than_the_bytes_hold_is_a_finding() -> None:
    planned = plan("Qwen/Qwen2.5-7B-Instruct", "vllm", hardware="rtx-4090", context=4096)
    report = EngineReport("vllm", "x", version="0.33", available_bytes=6 * GIB, tokens=50_000, precision=1)
    rounding = by_cause(attribute(planned, report))["block rounding"]
    assert rounding.within is False
    assert rounding.corrects is not None
    assert "KV dtype" in rounding.corrects


def test_reports_of_another_engine_and_empty_ones_are_refused() -> None:
    planned = plan("Qwen/Qwen2.5-7B-Instruct", "vllm", hardware="rtx-4090", context=4096)
    with pytest.raises(ConfigError, match="--engine sglang"):
        attribute(planned, EngineReport("sglang", "x", tokens=5))
    with pytest.raises(ConfigError, match="neither bytes, blocks nor tokens"):
        attribute(planned, EngineReport("vllm", "x"))


@given(
    weights=st.none() | st.integers(13 * GIB, 16 * GIB),
    activations=st.none() | st.integers(0, 3 * GIB),
    available=st.none() | st.integers(16 * MIB, 10 * GIB),
    tokens=st.integers(16, 200_000),
    share=st.none() | st.sampled_from([0.5, 0.9, 0.92]),
    version=st.sampled_from([None, "0.11.0", "0.18.0", "0.33.0"]),
    length=st.none() | st.sampled_from([1024, 4096, 32768]),
)
def test_the_causes_always_add_up(
    weights: int | None,
    activations: int | None,
    available: int | None,
    tokens: int,
    share: float | None,
    version: str | None,
    length: int | None,
) -> None:
    parts = {name: size for name, size in (("weights", weights), ("activations", activations)) if size is not None}
    report = EngineReport(
        "vllm",
        "x",
        version=version,
        utilization=share,
        max_model_len=length,
        parts=parts,
        available_bytes=available,
        tokens=tokens,
    )
    found = attribute(plan("Qwen/Qwen2.5-7B-Instruct", "vllm", hardware="rtx-4090", context=4096), report)
    assert by_cause(found)
    assert found.reported_tokens == tokens
