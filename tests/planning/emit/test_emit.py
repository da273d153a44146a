"""What is written for each engine: only options it has, every value with a reason, corrected where it would not fit."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml

from anaphora.errors import ConfigError
from anaphora.geometry.find import find_geometry
from anaphora.planning.ask import Wishes, ask
from anaphora.planning.emit import TARGETS, emit, find_target
from anaphora.planning.plan import answer
from anaphora.planning.settings import PlanSettings, settings_of

QWEN = "Qwen/Qwen2.5-7B-Instruct"
KNOWN = {
    # vLLM 0.32.0 and 0.33.0, `vllm serve --help=all`
    "vllm": "model dtype max-model-len max-num-seqs gpu-memory-utilization max-num-batched-tokens block-size "
    "enable-prefix-caching no-enable-prefix-caching kv-cache-dtype quantization tensor-parallel-size "
    "pipeline-parallel-size kv-offloading-size enable-prompt-tokens-details",
    # SGLang 0.5.23, ServerArgs
    "sglang": "model-path dtype context-length max-running-requests mem-fraction-static page-size chunked-prefill-size "
    "kv-cache-dtype tp-size pp-size disable-radix-cache enable-hierarchical-cache hicache-size enable-cache-report "
    "enable-metrics",
    # llama.cpp 0c1e57098, common/arg.cpp
    "llama.cpp": "m c np ngl ctk ctv fa ub b cache-ram no-cache-prompt metrics",
}
GONE = ("swap-space", "swap_space", "enable-radix-cache ", "cpu-offload-gb ", "num-gpu-blocks-override ")


def settings(engine: str, model: str = QWEN, **changes: Any) -> PlanSettings:
    """A plan on a card of 24 GB, 16 requests of 32,768 tokens, unless said otherwise."""
    options = {name: changes.pop(name) for name in ("enable_prefix_caching", "kv_offload_bytes") if name in changes}
    wishes: dict[str, Any] = {"hardware": "rtx-4090", "context": 32768, "concurrency": 16, "engine": engine} | changes
    question, _ = ask(model, find_geometry(model), Wishes(**wishes))
    return settings_of(answer(question), dtype=wishes.get("dtype", "auto"), **options)


def words(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", " "), comments=True)


def options(text: str) -> dict[str, str]:
    """Flags of a command and the word after each."""
    found = words(text)
    return {word: after for word, after in zip(found, [*found[1:], ""], strict=True) if re.match(r"-{1,2}[a-z]", word)}


def test_the_configuration_users_start_from_comes_out_corrected() -> None:
    plan = settings("vllm", dtype="float16", utilization=0.9, block_size=16, kv_offload_bytes=8 << 30)
    text = emit("vllm-yaml", plan)
    assert yaml.safe_load(text) == {
        "model": QWEN,
        "dtype": "float16",
        "max-model-len": 32768,
        "gpu-memory-utilization": 0.9,
        "max-num-seqs": 3,
        "max-num-batched-tokens": 2048,
        "enable-prefix-caching": True,
        "block-size": 16,
        "kv-offloading-size": 8,
        "enable-prompt-tokens-details": True,
    }
    unwrapped = re.sub(r"\n#   ", " ", text)
    assert "CORRECTED: 16 x 32,768 tokens need 28 GiB of KV" in unwrapped
    assert "swap_space is gone since vLLM 0.18" in unwrapped
    assert "(num-gpu-blocks-override) left to vLLM" in unwrapped


def test_the_three_forms_for_vllm_say_the_same() -> None:
    plan = settings("vllm", dtype="float16", kv_offload_bytes=8 << 30, kv_dtype="fp8")
    file = yaml.safe_load(emit("vllm-yaml", plan))
    command = words(emit("vllm-cli", plan))
    service = yaml.safe_load(emit("compose", plan))["services"]["vllm"]
    assert command == ["vllm", "serve", *service["command"]]
    assert all(isinstance(word, str) for word in service["command"])
    assert service["ports"] == ["8000:8000"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    flags = options(emit("vllm-cli", plan))
    for key, value in file.items():
        if key != "model":
            assert f"--{key}" in flags
            assert value is True or flags[f"--{key}"] == str(value)


def test_what_fits_is_left_as_asked() -> None:
    plan = settings("vllm", context=4096, concurrency=8)
    assert plan.corrections == ()
    assert (plan.max_num_seqs, plan.dtype) == (8, None)
    assert yaml.safe_load(emit("vllm-yaml", plan))["max-model-len"] == plan.max_model_len >= 4096


def test_a_context_too_long_for_one_request_is_shortened_to_what_fits() -> None:
    card = {"hardware": "rtx-3060-12gb", "quantization": "awq"}
    plan = settings("vllm", "Qwen/Qwen3-14B", context=40960, concurrency=2, **card)
    assert plan.max_num_seqs == 1
    assert 0 < plan.max_model_len < 40960
    assert plan.max_model_len % 256 == 0
    assert "not enough for one" in plan.corrections[0]
    again = settings("vllm", "Qwen/Qwen3-14B", context=plan.max_model_len, concurrency=1, **card)
    assert again.corrections == ()


def test_weights_that_do_not_fit_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"short of [\d.]+ GiB.*ways out"):
        settings("vllm", "Qwen/Qwen2.5-72B-Instruct")


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    "changes", [{}, {"kv_dtype": "fp8"}, {"enable_prefix_caching": False}, {"quantization": "fp8"}]
)
def test_only_options_the_engine_has_each_with_a_reason(name: str, changes: dict[str, Any]) -> None:
    engine = find_target(name).engine
    if engine in ("llama.cpp", "ollama", "anaphora"):
        changes = {
            key: {"kv_dtype": "q8_0", "quantization": "q4_k_m"}.get(key, value) for key, value in changes.items()
        }
        if engine == "anaphora":
            changes.pop("kv_dtype", None)
            changes.pop("quantization", None)
    text = emit(name, settings(engine, concurrency=2, kv_offload_bytes=4 << 30, **changes))
    live = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")) + "\n"
    assert not any(gone in live for gone in GONE)
    assert max(map(len, text.splitlines())) <= 120
    if engine in KNOWN and name != "compose":
        keys = options(text) if name != "vllm-yaml" else yaml.safe_load(text)
        assert {key.lstrip("-") for key in keys} <= set(KNOWN[engine].split())
        assert text.count("#") > len(keys)


def test_sglang_knows_fp8_by_its_long_name_and_has_no_flag_for_the_radix_cache() -> None:
    text = emit("sglang", settings("sglang", kv_dtype="fp8", kv_offload_bytes=8 << 30))
    flags = options(text)
    assert flags["--kv-cache-dtype"] == "fp8_e4m3"
    assert flags["--hicache-size"] == "8"
    assert "--disable-radix-cache" not in flags
    assert "--disable-radix-cache" in options(emit("sglang", settings("sglang", enable_prefix_caching=False)))


def test_llama_server_gets_the_sum_over_its_slots() -> None:
    plan = settings("llama.cpp", context=10000, concurrency=3, kv_dtype="q8_0/q4_0")
    flags = options(emit("llama-server", plan))
    assert flags["-np"] == "3"
    assert int(flags["-c"]) == 3 * -(-plan.max_model_len // 256) * 256
    assert (flags["-ctk"], flags["-ctv"], flags["-fa"]) == ("q8_0", "q4_0", "on")
    off = options(emit("llama-server", settings("llama.cpp", context=8192, enable_prefix_caching=False)))
    assert off["--cache-ram"] == "0"


def test_a_modelfile_holds_the_length_and_names_the_servers_variables() -> None:
    text = emit("ollama-modelfile", settings("ollama", context=16384, concurrency=2, kv_dtype="q8_0"))
    assert re.search(r"^FROM \./Qwen2\.5-7B-Instruct\.gguf$", text, re.MULTILINE)
    assert re.search(r"^PARAMETER num_ctx \d+$", text, re.MULTILINE)
    assert "OLLAMA_NUM_PARALLEL=2" in text
    assert "OLLAMA_KV_CACHE_TYPE=q8_0" in text
    assert "OLLAMA_FLASH_ATTENTION=1" in text


def test_a_gpu_without_bfloat16_is_told_float16() -> None:
    plan = settings("vllm", hardware="t4", context=4096, concurrency=1, quantization="awq")
    assert plan.dtype == "float16"
    assert "no bfloat16" in plan.why["dtype"]


def test_an_engine_chosen_block_is_not_overruled() -> None:
    """Hybrids: vLLM raises the block so that an attention page is as large as a state."""
    plan = settings("vllm", "Qwen/Qwen3-Next-80B-A3B-Instruct", hardware="h200", count=2, context=32768, concurrency=4)
    assert plan.block_size > 256
    assert "block-size" not in yaml.safe_load(emit("vllm-yaml", plan))
    assert "(block-size) vLLM raises it to" in emit("vllm-yaml", plan)


def test_several_devices_are_named_to_every_engine() -> None:
    wishes = {"hardware": "h100", "count": 2, "context": 8192, "concurrency": 4}
    plan = settings("vllm", "Qwen/Qwen3-32B", **wishes)
    assert yaml.safe_load(emit("vllm-yaml", plan))["tensor-parallel-size"] == 2
    compose = yaml.safe_load(emit("compose", plan))["services"]["vllm"]
    assert compose["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 2
    assert options(emit("sglang", settings("sglang", "Qwen/Qwen3-32B", **wishes)))["--tp-size"] == "2"


def test_a_target_of_another_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="--engine sglang"):
        emit("sglang", settings("vllm"))
    with pytest.raises(ConfigError, match="choose one of vllm-yaml"):
        find_target("tgi")
