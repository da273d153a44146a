"""Start-up logs of llama.cpp (llama-server) and of Ollama, which runs it. Line formats as their sources print them.

load_tensors:        CUDA0 model buffer size =  8148.38 MiB
llama_kv_cache: size = 8192.00 MiB ( 32768 cells,  64 layers,  1/1 seqs), K (f16): 4096.00 MiB, V (f16): 4096.00 MiB
llama_context:      CUDA0 compute buffer size =   307.00 MiB
older   llama_new_context_with_model: KV self size  = 1024.00 MiB, K (f16): 512.00 MiB, V (f16): 512.00 MiB
Ollama  msg=offload .. memory.required.kv="1.0 GiB" memory.graph.full="560.0 MiB"
"""

from __future__ import annotations

import re
from dataclasses import replace

from anaphora.planning.engine_report import MIB, EngineReport
from anaphora.planning.start_log_fields import NUMBER, Log, first, known, size

_MIB = r"\s*(MiB)"
_CACHE = re.compile(
    r"llama_kv_cache\w*: +size = *([\d.]+) MiB \( *(\d+) cells, *\d+ layers, *(\d+)/ *(\d+) seqs\)"
    r", K \((\w+)\)[^V]*V \((\w+)\)"
)
_OLD_CACHE = re.compile(r"KV self size *= *([\d.]+) MiB(?:, K \((\w+)\)[^V]*V \((\w+)\))?")
_STATE = re.compile(r"llama_memory_recurrent: size = *([\d.]+) MiB")


def read_llama_cpp(text: str, source: str, engine: str = "llama.cpp") -> EngineReport:
    """The report; buffers of all devices and of the CPU together."""
    log = Log(text)
    caches = [match.groups() for match in _CACHE.finditer(text)]
    old = _OLD_CACHE.search(text)
    kv: int | None = None
    cells = context = streams = None
    kinds: tuple[str, str] | None = None
    if caches:
        kv = round(sum(float(cache[0]) for cache in caches) * MIB)
        largest = max(caches, key=lambda cache: int(cache[1]))
        context, streams = int(largest[1]), max(1, int(largest[3]))
        cells = context * streams
        kinds = (largest[4], largest[5])
    elif old:
        kv = round(float(old[1]) * MIB)
        kinds = (old[2], old[3]) if old[2] else None
        context = cells = log.whole(r"n_ctx +=? *(\d+)", first)
    states = [float(match[1]) for match in _STATE.finditer(text)]
    if kv is not None and states:
        kv += round(sum(states) * MIB)
    offloaded = re.search(r"offloaded (\d+)/(\d+) layers to GPU", text)
    remarks = []
    if offloaded and offloaded[1] != offloaded[2]:
        remarks.append(f"only {offloaded[1]} of {offloaded[2]} layers are on the GPU; the buffers are those of all")
    if caches and int(caches[0][2]) > int(caches[0][3]):
        remarks.append(
            f"one unified cache (-kvu) serves {caches[0][2]} slots; the plan counts a slot a request, and sliding "
            "layers keep more cells in a unified one"
        )
    return EngineReport(
        engine=engine,
        source=source,
        version=log.word(r"\bbuild: (\d+)"),
        model=log.word(r"general\.name +(?:str )?= +(\S.*)") or log.word(r"loading model '([^']+)'"),
        max_model_len=context,
        max_num_seqs=streams,
        max_num_batched_tokens=log.whole(r"n_ubatch += *(\d+)", first),
        kv_cache_dtype=None if kinds is None else kinds[0] if kinds[0] == kinds[1] else "/".join(kinds),
        free_bytes=log.size(rf"using device [^\n]*- {NUMBER}{_MIB} free"),
        parts=known(weights=_sum(log, "model buffer size"), compute_buffer=_sum(log, "compute buffer size")),
        available_bytes=kv,
        tokens=cells,
        precision=MIB // 100,
        refused=log.word(
            r"(ggml_\w+: .*?(?:out of memory|failed to allocate)[^\n]*|failed to (?:create|initialize) [^\n]*)"
        ),
        remarks=tuple(remarks),
    )


def read_ollama(text: str, source: str) -> EngineReport:
    """Its runner's lines where they are, else its scheduler's own estimate."""
    report = read_llama_cpp(text, source, "ollama")
    log = Log(text)
    report = replace(
        report,
        version=log.word(r"\(version (\d[\w.-]*)\)") or report.version,
        free_bytes=log.size(r'memory\.available="\[([\d.]+) (GiB|MiB)', first) or report.free_bytes,
    )
    if report.available_bytes is not None:
        return report
    kv = log.size(r'memory\.required\.kv="([\d.]+) (GiB|MiB|B)"') or _sizes(log, "kv cache")
    return replace(
        report,
        available_bytes=kv,
        max_model_len=log.whole(r"--ctx-size (\d+)") or log.whole(r"\bKvSize:(\d+)"),
        max_num_seqs=log.whole(r"--parallel (\d+)") or log.whole(r"\bParallel:(\d+)"),
        parts=known(
            weights=log.size(r'memory\.weights\.total="([\d.]+) (GiB|MiB)"') or _sizes(log, "model weights"),
            compute_buffer=log.size(r'memory\.graph\.full="([\d.]+) (GiB|MiB)"') or _sizes(log, "compute graph"),
        ),
        precision=int(0.1 * 2**30),
        remarks=(*report.remarks, "Ollama's own estimate, printed to 0.1 GiB; its runner's lines are not in this log"),
    )


def _sum(log: Log, what: str) -> int | None:
    found = [size(match[1], match[2]) for match in log.every(rf"{what} *= *{NUMBER}{_MIB}")]
    return sum(found) if found else None


def _sizes(log: Log, what: str) -> int | None:
    """msg="kv cache" device=CUDA0 size="1.0 GiB"."""
    pattern = rf'msg="{what}" device=\S+ size="([\d.]+) (GiB|MiB|KiB|B)"'
    found = [size(match[1], match[2]) for match in log.every(pattern)]
    return sum(found) if found else None
