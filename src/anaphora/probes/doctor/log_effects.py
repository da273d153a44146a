"""The arithmetic behind the findings of a log. Sizes are bytes; GiB = 2^30, as the engines print them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class Facts:
    """What the log tells elsewhere."""

    share: float | None = None
    """gpu_memory_utilization or mem_fraction_static."""
    context: int | None = None
    """max_model_len or context length."""
    seqs: int | None = None
    """max_num_seqs."""
    slots: int | None = None

    @classmethod
    def of(cls, text: str) -> Facts:
        """The last value of each wins, as in the engines' command lines."""
        return cls(
            _last(r"(?:gpu[_-]memory[_-]utilization|mem[_-]fraction[_-]static)['\"]?\s*[=: ]\s*(\d*\.\d+)", text),
            _whole(r"(?:max[_-]model[_-]len|max[_-]seq[_-]len|context[_-]length|n_ctx)['\"]?\s*[=: ]\s*(\d{3,})", text),
            _whole(r"max[_-]num[_-]seqs['\"]?\s*[=: ]\s*(\d+)", text),
            _whole(r"(?:n_slots|n_parallel|--parallel|-np)\s*[=: ]\s*(\d+)", text),
        )


def _last(pattern: str, text: str) -> float | None:
    found = re.findall(pattern, text, re.IGNORECASE)
    return float(found[-1]) if found else None


def _whole(pattern: str, text: str) -> int | None:
    found = _last(pattern, text)
    return None if found is None else int(found)


def size(number: str, unit: str) -> float:
    """Bytes of "20.00", "GiB"."""
    return float(number.replace(",", "")) * _UNITS[unit.strip().upper().rstrip("B").rstrip("I")[:1]]


def gib(amount: float) -> str:
    """ "20.00 GiB", smaller ones in MiB."""
    return f"{amount / 2**30:.2f} GiB" if amount >= 2**30 else f"{amount / 2**20:,.0f} MiB"


def whole_blocks(tokens: float, block: int = 16) -> int:
    """Tokens rounded down to whole blocks."""
    return int(tokens) // block * block


def lower_share(share: float | None, by: float, total: float) -> str:
    """The share of the memory that leaves `by` bytes more free."""
    now = share if share is not None else 0.92
    return f"{max(0.05, math.floor((now - by / total) * 100) / 100):.2f}"


def too_long(match: re.Match[str], _facts: Facts) -> dict[str, object]:
    """vLLM: one request does not fit. KV is proportional to the length (windows make it less)."""
    context = int(match["context"].replace(",", ""))
    needed, free = float(match["needed"]), float(match["free"])
    estimated = match.groupdict().get("estimated")
    fits = int(estimated) if estimated else whole_blocks(context * free / needed)
    return {"context": context, "needed": needed, "free": free, "fits": fits,
            "kb": f"{needed * 2**20 / context:,.1f}", "half": f"{needed / 2:.2f}"}  # fmt: skip


def too_long_old(match: re.Match[str], _facts: Facts) -> dict[str, object]:
    """vLLM before 0.10: in tokens."""
    context, tokens = int(match["context"].replace(",", "")), int(match["tokens"].replace(",", ""))
    return {"context": context, "tokens": tokens, "short": context - tokens, "fits": whole_blocks(tokens)}


def not_free(match: re.Match[str], _facts: Facts) -> dict[str, object]:
    """vLLM: others hold the memory that it was promised."""
    free, total, share = float(match["free"]), float(match["total"]), float(match["share"])
    right = math.floor(free / total * 100 - 1) / 100
    return {"free": free, "total": total, "share": share, "wanted": f"{total * share:.2f}",
            "taken": f"{total - free:.2f}", "right": f"{max(right, 0.01):.2f}"}  # fmt: skip


def torch_out(match: re.Match[str], facts: Facts) -> dict[str, object]:
    """torch's OutOfMemoryError."""
    wanted = size(match["wanted"], match["wanted_unit"])
    total = size(match["total"], match["total_unit"])
    free = size(match["free"], match["free_unit"])
    missing = max(wanted - free, 0)
    spare = missing + 0.02 * total
    return {"wanted": gib(wanted), "total": gib(total), "free": gib(free), "missing": gib(missing),
            "share": f"{facts.share:g}" if facts.share else "the default 0.92",
            "right": lower_share(facts.share, spare, total), "spare": gib(spare)}  # fmt: skip


def warm_up(match: re.Match[str], facts: Facts) -> dict[str, object]:
    """vLLM: warming the sampler up with as many requests as may run."""
    seqs = int(match["seqs"])
    share = facts.share or 0.92
    return {"seqs": seqs, "half": max(1, seqs // 2), "share": f"{share:g}", "right": f"{share - 0.03:.2f}"}


def capture(match: re.Match[str], facts: Facts) -> dict[str, object]:
    """Out of memory while CUDA graphs are captured."""
    share = facts.share or 0.92
    return {"share": f"{share:g}", "right": f"{min(share - 0.02, 0.97):.2f}"}


def no_blocks(match: re.Match[str], facts: Facts) -> dict[str, object]:
    """vLLM: nothing left for KV."""
    share = facts.share
    return {"share": f"{share:g}" if share else "0.92, the default",
            "right": f"{min(0.95, (share or 0.92) + 0.05):.2f}"}  # fmt: skip


def small_pool(match: re.Match[str], facts: Facts) -> dict[str, object]:
    """vLLM: preemptions."""
    seqs = facts.seqs
    fewer = f"max-num-seqs {max(1, seqs * 3 // 4)} (now {seqs})" if seqs else "a lower max-num-seqs"
    return {"count": match.groupdict().get("count") or "some", "act": fewer}


def over_context(match: re.Match[str], _facts: Facts) -> dict[str, object]:
    """A request that does not fit into the context."""
    groups = match.groupdict()
    limit = int(groups["limit"].replace(",", ""))
    prompt = int((groups.get("prompt") or "0").replace(",", ""))
    asked = int((groups.get("asked") or "0").replace(",", ""))
    left = limit - prompt
    if prompt and left > 0:
        act = f'max_tokens {left} at most for this prompt (in Claude Code CLAUDE_CODE_MAX_OUTPUT_TOKENS="{left}")'
    else:
        act = f"a prompt shorter by {max(prompt - limit, 0) + 256:,} tokens" if prompt else "a shorter prompt"
    longer = f"{max(2 * limit, prompt + asked):,}"
    return {"limit": limit, "prompt": f"{prompt:,}" if prompt else "an unknown number of", "act": act, "longer": longer}


def llama_buffer(match: re.Match[str], facts: Facts) -> dict[str, object]:
    """llama.cpp: a buffer that does not fit on the device."""
    wanted = size(match["wanted"], match["unit"])
    context = facts.context
    act = (
        f"--ctx-size {max(512, context // 2)} (half of {context:,}: half the KV)" if context else "half the --ctx-size"
    )
    return {"wanted": gib(wanted), "act": act}


def llama_slot(match: re.Match[str], facts: Facts) -> dict[str, object]:
    """llama-server: the context of one slot."""
    tokens, limit = int(match["prompt"]), int(match["limit"])
    slots = facts.slots or 1
    need = 1 << (tokens + 256).bit_length() if tokens else limit * 2
    return {"prompt": tokens, "limit": limit, "need": need, "total": need * slots, "slots": slots}


EFFECTS: dict[str, Callable[[re.Match[str], Facts], dict[str, object]]] = {
    "log.vllm-too-long": too_long,
    "log.vllm-too-long-old": too_long_old,
    "log.vllm-not-free": not_free,
    "log.vllm-no-blocks": no_blocks,
    "log.vllm-warm-up": warm_up,
    "log.vllm-preempted": small_pool,
    "log.graph-capture": capture,
    "log.torch-oom": torch_out,
    "log.context": over_context,
    "log.llama-buffer": llama_buffer,
    "log.llama-slot": llama_slot,
    "log.sglang-memory": no_blocks,
}
"""Finding -> the numbers its words need; the others use the groups of their pattern."""
