"""vLLM's start-up log, 0.6 to 0.33. Line formats as its sources print them.

before 0.8   model weights take 14.96GiB; non_torch_memory takes 1.79GiB; PyTorch activation peak memory takes 1.26GiB
             # GPU blocks: 5691, # CPU blocks: 2048
0.8 - 0.31   Available KV cache memory: 13.10 GiB / GPU KV cache size: 245,360 tokens
             Maximum concurrency for 32,768 tokens per request: 7.49x
0.32         both of the last two on one line
since 0.10   Free memory on device (../.. GiB) on startup. ... Actual usage is 14.25 GiB for weight, ...
"""

from __future__ import annotations

import re

from anaphora.planning.engine_report import EngineReport
from anaphora.planning.start_log_fields import NUMBER, Log, first, known

_GIB = r"\s*(GiB|GB|MiB)"
_ON_TOP_UNTIL = (0, 21)
_REFUSALS = (
    r"((?:To serve at least one request with the model|The model's max seq len)[^\n]*)",
    r"(No available memory for the cache blocks[^\n]*)",
    r"(Free memory on device [^\n]* is less than (?:desired|the engine's)[^\n]*)",
    r"(torch\.(?:cuda\.)?OutOfMemoryError: [^\n]*)",
)


def read_vllm(text: str, source: str) -> EngineReport:
    """The report; figures of several ranks are the tightest."""
    log = Log(text)
    version = _version(log)
    weights = log.size(rf"(?:[Mm]odel loading took|Loading model weights took|model weights take) {NUMBER}{_GIB}")
    estimated = log.size(rf"Estimated CUDA graph memory: {NUMBER}{_GIB}")
    captured = log.size(rf"Graph capturing finished in .*?took {NUMBER}{_GIB}")
    needed, available = _needed(log), _available(log)
    concurrency = log.number(rf"Maximum concurrency for [\d,]+ tokens per request: {NUMBER}x", min)
    remarks = _remarks(log)
    on_top = version is not None and _release(version) < _ON_TOP_UNTIL
    graphs = captured if on_top else estimated
    if captured is not None and not on_top:
        remarks.append(f"CUDA graphs took {captured / 2**30:.2f} GiB when they were captured")
    return EngineReport(
        engine="vllm",
        source=source,
        version=version,
        model=log.word(r"(?:config: model=|'model(?:_tag)?': )'([^']+)'"),
        max_model_len=_max_model_len(log),
        max_num_seqs=_argument(log, "max_num_seqs"),
        max_num_batched_tokens=log.whole(r"max_num_batched_tokens=(\d+)") or _argument(log, "max_num_batched_tokens"),
        block_size=_argument(log, "block_size"),
        utilization=_utilization(log),
        kv_cache_dtype=log.word(r"kv_cache_dtype=(\w+)") or log.word(r"'kv_cache_dtype': '(\w+)'"),
        tensor_parallel_size=log.whole(r"tensor_parallel_size=(\d+)") or _argument(log, "tensor_parallel_size"),
        eager=_flag(log.word(r"enforce_eager(?:=|': )(True|False)")),
        only_named="non-default args" in text,
        device_bytes=_device(log),
        free_bytes=log.size(rf"Free memory on device[^(]*\({NUMBER}/[\d.]+{_GIB}\)", min),
        allowed_bytes=log.size(rf"gpu_memory_utilization \([\d.]+\) = {NUMBER}{_GIB}")
        or log.size(rf"GPU memory utilization is \([\d.]+, {NUMBER}{_GIB}\)"),
        parts=known(
            weights=weights,
            activations=_activations(log, estimated),
            libraries=_libraries(log, weights),
            CUDA_graphs=graphs,
        ),
        available_bytes=available,
        num_blocks=log.whole(rf"# (?:GPU|cuda|CPU|cpu) blocks: {NUMBER}, # CPU", min),
        tokens=log.whole(rf"KV cache size: {NUMBER} tokens", min) or log.whole(r"stored in KV cache \((\d+)\)", min),
        max_concurrency=concurrency,
        needed_bytes=needed,
        longest=log.whole(r"estimated maximum model length is (\d+)"),
        refused=next((found for pattern in _REFUSALS if (found := log.word(pattern))), None),
        remarks=tuple(remarks),
    )


def _version(log: Log) -> str | None:
    return log.word(r"LLM engine \(v([^)\s]+)\)") or log.word(r"vLLM API server version v?(\S+)")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _argument(log: Log, name: str) -> int | None:
    """Of "non-default args: {'x': 1}", of "args: Namespace(x=1)"."""
    found = log.word(rf"(?:'{name}': |\b{name}=)(\d+)\b")
    return int(found) if found else None


def _max_model_len(log: Log) -> int | None:
    return (
        log.whole(r"Maximum concurrency for ([\d,]+) tokens")
        or log.whole(r"max seq(?:uence)? len \((\d+)\)")
        or log.whole(r"max_seq_len=(\d+)")
        or _argument(log, "max_model_len")
    )


def _utilization(log: Log) -> float | None:
    return (
        log.number(r"gpu_memory_utilization \(([\d.]+)\)", first)
        or log.number(r"GPU memory utilization is \(([\d.]+),", first)
        or log.number(r"(?:'gpu_memory_utilization': |gpu_memory_utilization=)([\d.]+\d)", first)
        or log.number(r"current --gpu-memory-utilization=([\d.]+\d)", first)
    )


def _flag(word: str | None) -> bool | None:
    return None if word is None else word == "True"


def _device(log: Log) -> int | None:
    return log.size(rf"total_gpu_memory(?:=| \(){NUMBER}{_GIB}") or log.size(
        rf"Free memory on device[^(]*\([\d.]+/{NUMBER}{_GIB}\)"
    )


def _available(log: Log) -> int | None:
    """The smallest over the ranks: it decides the blocks of all."""
    patterns = (
        rf"Available KV cache memory: {NUMBER}{_GIB}",
        rf"available KV cache memory \({NUMBER}{_GIB}\)",
        rf"reserved for KV Cache is {NUMBER}{_GIB}",
        rf"kv_cache_size={NUMBER}{_GIB}",
        rf"reserved {NUMBER}{_GIB} memory for KV Cache",
        rf"Auto set \({NUMBER}/[\d.]+\) (GiB) for KV cache",
    )
    return next((found for pattern in patterns if (found := log.size(pattern, min)) is not None), None)


def _needed(log: Log) -> int | None:
    return log.size(rf"\({NUMBER}{_GIB} KV cache is needed")


def _activations(log: Log, estimated: int | None) -> int | None:
    """The profiled peak. Since graphs are estimated inside the share, what is printed holds them too."""
    stated = log.size(rf"PyTorch activation peak memory takes {NUMBER}{_GIB}")
    if stated is not None:
        return stated
    peak = log.size(rf"{NUMBER}{_GIB} for peak activation")
    return None if peak is None else peak - (estimated or 0)


def _libraries(log: Log, weights: int | None) -> int | None:
    stated = log.size(rf"non_torch_memory(?: takes |=){NUMBER}{_GIB}") or log.size(
        rf"{NUMBER}{_GIB} for non-torch memory"
    )
    if stated is not None or weights is None:
        return stated
    consumed = log.size(rf"{NUMBER}{_GIB} for consumed memory")
    return None if consumed is None else consumed - weights


def _remarks(log: Log) -> list[str]:
    found = []
    if log.every(r"[Oo]verriding num_gpu_blocks="):
        found.append("num_gpu_blocks_override is set: the blocks are not what the memory would give")
    ranks = log.word(r"Multiplying the GPU KV cache size by the dcp_world_size (\d+)")
    if ranks:
        found.append(f"the printed tokens are those of {ranks} ranks together (decode context parallel)")
    if log.every(r"as specified by kv_cache_memory_bytes"):
        found.append("kv_cache_memory_bytes is set: the share does not count")
    available = {match[1] for match in log.every(rf"Available KV cache memory: {NUMBER}{_GIB}")}
    if len(available) > 1:
        found.append(f"the ranks have unequal memory ({', '.join(sorted(available))} GiB); the least decides")
    return found
