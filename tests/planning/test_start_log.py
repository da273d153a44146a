"""Start-up logs as each engine's sources print them, old and new."""

from __future__ import annotations

import pytest

from anaphora.errors import ConfigError
from anaphora.planning.engine_report import EngineReport
from anaphora.planning.start_log import read_log
from support.start_logs import start_log

GIB = 2**30
MIB = 2**20


def gib(count: int | None) -> float:
    assert count is not None
    return round(count / GIB, 2)


def test_vllm_before_v1() -> None:
    report = read_log(start_log("vllm_v0"))
    assert (report.engine, report.version, report.short_version) == ("vllm", "0.6.6", (0, 6))
    assert report.model == "meta-llama/Meta-Llama-3-8B"
    assert (report.utilization, report.max_num_seqs, report.max_model_len) == (0.9, 256, 8192)
    assert gib(report.device_bytes) == 79.22
    assert {name: gib(size) for name, size in report.parts.items()} == {
        "weights": 14.96,
        "activations": 1.26,
        "libraries": 1.79,
        "CUDA graphs": 0.21,
    }
    assert gib(report.available_bytes) == 53.29
    assert (report.num_blocks, report.tokens, report.max_concurrency) == (27285, None, 53.29)


def test_vllm_v1_takes_the_tightest_rank() -> None:
    report = read_log(start_log("vllm_v1"))
    assert (report.version, report.tensor_parallel_size, report.max_num_seqs) == ("0.11.0", 2, None)
    assert report.only_named
    assert gib(report.available_bytes) == 34.49
    assert (report.tokens, report.max_model_len) == (282544, 16000)
    assert {name: gib(size) for name, size in report.parts.items()} == {
        "weights": 30.59,
        "activations": 5.64,
        "libraries": 0.54,
        "CUDA graphs": 0.69,
    }
    assert (gib(report.free_bytes), gib(report.device_bytes), report.utilization) == (78.67, 79.18, 0.9)
    assert any("unequal memory" in remark for remark in report.remarks)


def test_vllm_now_prints_capacity_on_one_line_and_weighs_graphs_inside() -> None:
    report = read_log(start_log("vllm_now"))
    assert (report.tokens, report.max_concurrency, report.max_model_len) == (129184, 3.94, 32768)
    assert (report.max_num_seqs, report.utilization) == (3, 0.92)
    parts = {name: gib(size) for name, size in report.parts.items()}
    assert parts == {"weights": 14.25, "activations": 0.41, "libraries": 0.06, "CUDA graphs": 0.14}
    assert any("0.22 GiB when they were captured" in remark for remark in report.remarks)


def test_a_refused_start_says_what_was_needed() -> None:
    report = read_log(start_log("vllm_refused"))
    assert (gib(report.needed_bytes), gib(report.available_bytes), report.longest) == (7.0, 6.9, 129168)
    assert report.refused is not None
    assert report.refused.startswith("To serve at least one request")


def test_sglang_old() -> None:
    report = read_log(start_log("sglang_old"))
    assert (report.engine, report.utilization, report.tokens) == ("sglang", 0.88, 444500)
    assert (gib(report.free_bytes), gib(report.parts["weights"]), gib(report.available_bytes)) == (78.81, 15.09, 54.26)
    assert gib(report.allowed_bytes) == 69.35
    assert (report.max_num_seqs, report.max_model_len) == (2049, 131072)


def test_sglang_now_counts_states_and_only_one_rank() -> None:
    report = read_log(start_log("sglang_now"))
    assert (report.version, report.tensor_parallel_size, report.block_size) == ("0.5.23", 2, 64)
    assert gib(report.available_bytes) == 9.48
    assert gib(report.free_bytes) == 139.1
    assert (gib(report.parts["CUDA graphs"]), report.tokens) == (0.25, 327310)


def test_llama_cpp_adds_the_sliding_layers() -> None:
    report = read_log(start_log("llama_cpp"))
    assert (report.engine, report.version, report.model) == ("llama.cpp", "8680", "Gpt-Oss-20B")
    assert (report.available_bytes, report.tokens, report.kv_cache_dtype) == (1338 * MIB, 56064, "f16")
    assert report.parts["weights"] == pytest.approx((586.82 + 11553.90) * MIB, abs=2)
    assert report.parts["compute buffer"] == pytest.approx((398.38 + 17.01) * MIB, abs=2)
    assert (report.max_num_seqs, report.max_num_batched_tokens, report.free_bytes) == (1, 512, 23869 * MIB)


def test_llama_cpp_old_and_partly_offloaded() -> None:
    report = read_log(start_log("llama_cpp_old"))
    assert (report.available_bytes, report.tokens, report.kv_cache_dtype) == (576 * MIB, 4096, "q8_0/f16")
    assert any("12 of 37 layers" in remark for remark in report.remarks)


@pytest.mark.parametrize(
    ("name", "version", "kv", "weights", "slots"),
    [("ollama_old", "0.5.12", 1.0, 4.9, 4), ("ollama_now", "0.19.0", 8.0, 18.48, 1)],
)
def test_ollama(name: str, version: str, kv: float, weights: float, slots: int) -> None:
    report = read_log(start_log(name))
    assert (report.engine, report.version, report.max_num_seqs) == ("ollama", version, slots)
    assert (gib(report.available_bytes), gib(report.parts["weights"])) == (kv, weights)


@pytest.mark.parametrize("text", ["", "  \n\n"])
def test_an_empty_log_says_how_to_get_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"empty; start the engine.*tee"):
        read_log(text)


def test_a_log_of_something_else_names_what_can_be_read() -> None:
    with pytest.raises(ConfigError, match=r"vLLM, SGLang, llama\.cpp.*--attach URL"):
        read_log("2026-11-01 nginx: worker process 12 started\n")


def test_a_log_that_ends_early_says_so_and_why() -> None:
    text = start_log("vllm_now").partition("Estimated")[0]
    with pytest.raises(ConfigError, match="ends before the KV cache is allotted"):
        read_log(text)
    with pytest.raises(ConfigError, match=r"It stopped with: torch\.OutOfMemoryError: CUDA out of memory"):
        read_log(text + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB\n")


def test_odd_versions_have_no_short_form() -> None:
    assert EngineReport("vllm", "x", version="v0.20.1rc1").short_version == (0, 20)
    assert EngineReport("vllm", "x", version="dev").short_version is None
    assert EngineReport("vllm", "x").short_version is None
