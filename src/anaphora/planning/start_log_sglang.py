"""SGLang's start-up log, 0.4 to 0.5.23. Line formats as its sources print them; its GB are GiB.

Load weight begin. avail mem=78.81 GB
Load weight end. type=.., avail mem=63.72 GB, mem usage=15.09 GB.
KV Cache is allocated. dtype: torch.bfloat16, #tokens: 444500, K size: 27.13 GB, V size: 27.13 GB
Capture cuda graph end. Time elapsed: 5.20 s. mem usage=0.18 GB. avail mem=7.9 GB.
max_total_num_tokens=444500, chunked_prefill_size=8192, .., max_running_requests=2048, context_len=131072, ..
"""

from __future__ import annotations

import re

from anaphora.planning.engine_report import EngineReport
from anaphora.planning.start_log_fields import NUMBER, Log, first, known

_RANK = re.compile(r"\bTP(\d+)\b")
_GB = r"\s*(GB)"


def read_sglang(text: str, source: str) -> EngineReport:
    """The report of the first rank that speaks."""
    log = Log(_one_rank(text))
    tokens = log.whole(r"max_total_num_tokens=(\d+)") or log.whole(r"#tokens: (\d+)")
    free = log.size(rf"Load weight begin\. avail mem={NUMBER}{_GB}", first)
    share = log.number(r"mem_fraction_static=([\d.]+\d)", first)
    remarks = []
    if free is not None:
        remarks.append("its figures are of the first rank; other processes lower what is free before the weights")
    left = log.size(rf"Memory pool end\. avail mem={NUMBER}{_GB}", first)
    if left is not None:
        remarks.append(f"{left / 2**30:.2f} GiB were left for activations and graphs")
    return EngineReport(
        engine="sglang",
        source=source,
        version=log.word(r"[Ss][Gg][Ll]ang[ -](?:version )?v?(\d+\.\d+\.\d+\S*)"),
        model=log.word(r"model_path='([^']+)'"),
        max_model_len=log.whole(r"context_len=(\d+)"),
        max_num_seqs=log.whole(r"max_running_requests=(\d+)"),
        max_num_batched_tokens=log.whole(r"chunked_prefill_size=(\d+)"),
        block_size=log.whole(r"page_size=(\d+)"),
        utilization=share,
        kv_cache_dtype=log.word(r"kv_cache_dtype='([^']+)'"),
        tensor_parallel_size=log.whole(r"tp_size=(\d+)"),
        free_bytes=free,
        allowed_bytes=int(free * share) if free is not None and share is not None else None,
        parts=known(
            weights=log.size(rf"Load weight end\..*?mem usage={NUMBER}{_GB}", first),
            CUDA_graphs=_graphs(log),
        ),
        available_bytes=_pools(log),
        tokens=tokens,
        refused=log.word(r"(Not enough memory[^\n]*|torch\.(?:cuda\.)?OutOfMemoryError: [^\n]*)"),
        remarks=tuple(remarks),
    )


def _one_rank(text: str) -> str:
    ranks = sorted({int(found) for found in _RANK.findall(text)})
    if not ranks:
        return text
    others = re.compile(rf"\bTP(?!{ranks[0]}\b)\d+\b")
    return "\n".join(line for line in text.splitlines() if not others.search(line))


def _pools(log: Log) -> int | None:
    """Keys, values and states of all pools: models with windows have two pools, hybrids states beside them."""
    pattern = r"KV Cache is allocated\.[^\n]*"
    sizes = [
        round(float(number) * 2**30)
        for line in log.every(pattern)
        for number in re.findall(r"(?:K|V|KV) size: ([\d.]+) GB", line[0])
    ]
    resized = [round(float(found[1]) * 2**30) for found in log.every(r"KV cache allocated\.[^\n]*KV size: ([\d.]+) GB")]
    states = [
        round(float(number) * 2**30)
        for line in log.every(r"max_mamba_cache_size: [^\n]*")
        for number in re.findall(r"(?:conv|ssm)_state size: ([\d.]+)\s?GB", line[0])
    ]
    found = (resized or sizes) + states
    return sum(found) if found else None


def _graphs(log: Log) -> int | None:
    """All captures together."""
    found = [
        round(float(match[1]) * 2**30) for match in log.every(r"Capture [^\n]*?graph end\.[^\n]*?mem usage=([\d.]+) GB")
    ]
    return sum(found) if found else None
