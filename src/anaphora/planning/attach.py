"""From the answers of a running server to an EngineReport. Asking is the caller's part: no connection is opened here.

vLLM          /metrics  vllm:cache_config_info{num_gpu_blocks=..,block_size=..,kv_cache_size_tokens=..}
SGLang        /server_info (older: /get_server_info)  internal_states[0].memory_usage
llama-server  /props  default_generation_settings.n_ctx, total_slots
anaphora      /metrics  anaphora_kv_blocks{state=..}, anaphora_kv_block_size_tokens, anaphora_kv_bytes_per_token
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from anaphora.errors import ConfigError
from anaphora.planning.engine_report import GIB, EngineReport
from anaphora.planning.start_log_fields import known


class Sample(Protocol):
    """One sample of a Prometheus scrape."""

    @property
    def name(self) -> str: ...
    @property
    def labels(self) -> dict[str, str]: ...
    @property
    def value(self) -> float: ...


def read_answers(source: str, samples: Iterable[Sample], documents: Mapping[str, Any]) -> EngineReport:
    """What the server says of its memory. `documents`: parsed JSON by route.

    Raises ConfigError where no engine that is known here answers, with what to switch on.
    """
    scrape = list(samples)
    info = next((sample.labels for sample in scrape if sample.name == "vllm:cache_config_info"), None)
    if info is not None:
        return _vllm(source, info, documents)
    if any(sample.name == "anaphora_kv_blocks" for sample in scrape):
        return _anaphora(source, scrape, documents)
    server = _mapping(documents.get("/server_info")) or _mapping(documents.get("/get_server_info"))
    if "mem_fraction_static" in server or "max_total_num_tokens" in server:
        return _sglang(source, server)
    props = _mapping(documents.get("/props"))
    if "total_slots" in props:
        return _llama_server(source, props, documents)
    raise ConfigError(
        f"{source} answers, but tells nothing of its memory. Asked were: /metrics (vLLM, anaphora), /server_info "
        "(SGLang; it may want the admin key), /props (llama-server). A gateway in front hides them: "
        "attach to the engine's own port, or give its start-up log with --log FILE"
    )


def _vllm(source: str, info: Mapping[str, str], documents: Mapping[str, Any]) -> EngineReport:
    model = _first_model(documents)
    utilization = info.get("gpu_memory_utilization")
    return EngineReport(
        engine="vllm",
        source=source,
        version=_mapping(documents.get("/version")).get("version"),
        model=model.get("root") or model.get("id"),
        max_model_len=_integer(model.get("max_model_len")),
        block_size=_integer(info.get("block_size")),
        utilization=float(utilization) if utilization not in (None, "None") else None,
        kv_cache_dtype=info.get("cache_dtype"),
        available_bytes=_integer(info.get("kv_cache_memory_bytes")),
        num_blocks=_integer(info.get("num_gpu_blocks")),
        tokens=_integer(info.get("kv_cache_size_tokens")),
        max_concurrency=_float(info.get("kv_cache_max_concurrency")),
        remarks=_override(info),
    )


def _override(info: Mapping[str, str]) -> tuple[str, ...]:
    if info.get("num_gpu_blocks_override", "None") == "None":
        return ()
    return ("num_gpu_blocks_override is set: the blocks are not what the memory would give",)


def _sglang(source: str, server: Mapping[str, Any]) -> EngineReport:
    states = server.get("internal_states")
    memory = _mapping(_mapping(states[0]).get("memory_usage")) if isinstance(states, list) and states else {}
    graphs = memory.get("graph")
    if isinstance(graphs, Mapping):
        graphs = sum(value for value in graphs.values() if isinstance(value, (int, float)))
    return EngineReport(
        engine="sglang",
        source=source,
        version=server.get("version"),
        model=server.get("model_path"),
        max_model_len=_integer(server.get("context_length")) or _integer(server.get("max_req_input_len")),
        max_num_seqs=_integer(server.get("max_running_requests")),
        max_num_batched_tokens=_integer(server.get("chunked_prefill_size")),
        block_size=_integer(server.get("page_size")),
        utilization=_float(server.get("mem_fraction_static")),
        kv_cache_dtype=server.get("kv_cache_dtype"),
        tensor_parallel_size=_integer(server.get("tp_size")),
        parts=known(weights=_gib(memory.get("weight")), CUDA_graphs=_gib(graphs)),
        available_bytes=_gib(memory.get("kvcache")),
        tokens=_integer(memory.get("token_capacity")) or _integer(server.get("max_total_num_tokens")),
        precision=GIB // 1000,
    )


def _llama_server(source: str, props: Mapping[str, Any], documents: Mapping[str, Any]) -> EngineReport:
    length = _integer(_mapping(props.get("default_generation_settings")).get("n_ctx"))
    slots = _integer(props.get("total_slots")) or 1
    weights = _integer(_mapping(_first_model(documents).get("meta")).get("size"))
    return EngineReport(
        engine="llama.cpp",
        source=source,
        version=str(props.get("build_info", "")).removeprefix("b").partition("-")[0] or None,
        model=props.get("model_path"),
        max_model_len=length,
        max_num_seqs=slots,
        parts=known(weights=weights),
        tokens=length * slots if length else None,
        precision=1,
        remarks=("/props does not say how many bytes the cache takes; the start-up log does (--log)",),
    )


def _anaphora(source: str, samples: list[Sample], documents: Mapping[str, Any]) -> EngineReport:
    values = {sample.name: sample.value for sample in samples}
    blocks = int(sum(sample.value for sample in samples if sample.name == "anaphora_kv_blocks"))
    model = _first_model(documents)
    return EngineReport(
        engine="anaphora",
        source=source,
        model=model.get("id"),
        max_model_len=_integer(model.get("max_model_len")),
        block_size=int(values.get("anaphora_kv_block_size_tokens", 0)) or None,
        num_blocks=blocks,
        precision=1,
    )


def _first_model(documents: Mapping[str, Any]) -> Mapping[str, Any]:
    entries = _mapping(documents.get("/v1/models")).get("data")
    return _mapping(entries[0]) if isinstance(entries, list) and entries else {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _integer(value: Any) -> int | None:
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        return None


def _float(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _gib(value: Any) -> int | None:
    return round(value * GIB) if isinstance(value, (int, float)) else None
