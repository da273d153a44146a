"""What running engines answer, as one report. Shapes as in the sources of vLLM 0.32, SGLang 0.5.23 and llama.cpp."""

from __future__ import annotations

from typing import Any

import pytest

from anaphora.errors import ConfigError
from anaphora.planning.attach import read_answers
from anaphora.planning.engine_report import GIB
from anaphora.probes.prometheus import parse_metrics

VLLM_METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",\
gpu_memory_utilization="0.92",kv_cache_max_concurrency="3.942",kv_cache_memory_bytes="None",\
kv_cache_size_tokens="129184",num_gpu_blocks="8074",num_gpu_blocks_override="None"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""
SGLANG: dict[str, Any] = {
    "model_path": "Qwen/Qwen2.5-7B-Instruct",
    "version": "0.5.23",
    "mem_fraction_static": 0.88,
    "tp_size": 1,
    "page_size": 1,
    "max_running_requests": 16,
    "chunked_prefill_size": 4096,
    "context_length": 32768,
    "kv_cache_dtype": "auto",
    "internal_states": [
        {
            "memory_usage": {
                "weight": 14.31,
                "kvcache": 6.105,
                "token_capacity": 114311,
                "graph": {"decode": 0.21, "prefill": 0.1},
            }
        }
    ],
}
PROPS = {
    "default_generation_settings": {"n_ctx": 8192, "params": {}},
    "total_slots": 4,
    "model_path": "/models/q.gguf",
    "build_info": "b8680-0c1e57098",
}


def read(metrics: str = "", **documents: Any) -> Any:
    routes = {f"/{name.replace('v1_', 'v1/')}": found for name, found in documents.items()}
    return read_answers("http://here", parse_metrics(metrics), routes)


def test_vllm() -> None:
    report = read(
        VLLM_METRICS,
        version={"version": "0.32.0"},
        v1_models={"data": [{"id": "m", "root": "org/m", "max_model_len": 32768}]},
    )
    assert (report.engine, report.version, report.model, report.max_model_len) == ("vllm", "0.32.0", "org/m", 32768)
    assert (report.num_blocks, report.block_size, report.tokens) == (8074, 16, 129184)
    assert (report.utilization, report.max_concurrency, report.available_bytes) == (0.92, 3.942, None)
    assert report.remarks == ()


def test_vllm_before_it_told_tokens_and_with_an_override() -> None:
    older = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="500",num_gpu_blocks_override="500"} 1.0\n'
    report = read(older)
    assert (report.tokens, report.num_blocks, report.utilization) == (None, 500, None)
    assert "override" in report.remarks[0]


@pytest.mark.parametrize("route", ["server_info", "get_server_info"])
def test_sglang(route: str) -> None:
    report = read("", **{route: SGLANG})
    assert (report.engine, report.tokens, report.utilization) == ("sglang", 114311, 0.88)
    assert report.available_bytes == round(6.105 * GIB)
    assert report.parts == {"weights": round(14.31 * GIB), "CUDA graphs": round(0.31 * GIB)}


def test_sglang_before_it_told_graphs_apart() -> None:
    state = {"memory_usage": {"weight": 15.1, "kvcache": 50.0, "token_capacity": 409600, "graph": 0.2}}
    report = read(get_server_info={**SGLANG, "internal_states": [state]})
    assert report.parts["CUDA graphs"] == round(0.2 * GIB)


def test_llama_server() -> None:
    report = read(props=PROPS, v1_models={"data": [{"id": "q", "meta": {"size": 4_683_073_536}}]})
    assert (report.engine, report.version, report.max_num_seqs) == ("llama.cpp", "8680", 4)
    assert (report.max_model_len, report.tokens, report.parts) == (8192, 32768, {"weights": 4_683_073_536})


def test_anaphora() -> None:
    metrics = (
        'anaphora_kv_blocks{state="free"} 100.0\nanaphora_kv_blocks{state="active"} 20.0\n'
        'anaphora_kv_blocks{state="cached"} 8.0\nanaphora_kv_block_size_tokens 16.0\n'
    )
    report = read(metrics, v1_models={"data": [{"id": "tiny", "max_model_len": 512}]})
    assert (report.engine, report.num_blocks, report.block_size, report.max_model_len) == ("anaphora", 128, 16, 512)


def test_a_server_that_tells_nothing_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"tells nothing of its memory.*--log FILE"):
        read("http_requests_total 3\n", v1_models={"data": [{"id": "gpt"}]}, props=[], server_info="no")
