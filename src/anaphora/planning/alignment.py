"""A plan moved, setting by setting, to what an engine really runs with: each step's effect is its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from anaphora.errors import AnaphoraError
from anaphora.planning.engine_report import EngineReport
from anaphora.planning.plan import Question

SLOT_ENGINES = ("llama.cpp", "ollama")
"""They allot what they are told, a slot a request."""
_NEAR = 0.001
"""Devices of memory as near as this are the same device."""
_LONGEST_BLOCK = 256
"""Longer ones are vLLM's own choice for a hybrid."""
_SAME_KV = ({"auto", "f16", "float16", "bfloat16"}, {"fp8", "fp8_e4m3"})
_OPTIONS = {
    "tensor_parallel_size": "--tp",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "block_size": "--block-size",
    "kv_cache_dtype": "--kv-dtype",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One setting that differs."""

    name: str
    planned: str
    real: str
    option: str | None
    """Of `anaphora plan`; None where there is no such."""
    question: Question
    """The plan with this and all earlier steps taken."""


def align(question: Question, report: EngineReport) -> list[Step]:
    """What differs between plan and engine, in the order it is set right. State changes: none."""
    steps: list[Step] = []
    for rule in (_version, _memory, _share, _eager, _length, _slots, *map(_setting, _OPTIONS)):
        current = steps[-1].question if steps else question
        try:
            step = rule(current, report)
        except AnaphoraError:
            continue  # a value that the plan's own rules refuse stays for the rest to explain
        if step is not None:
            steps.append(step)
    return steps


Rule = Callable[[Question, EngineReport], Step | None]


def _version(question: Question, report: EngineReport) -> Step | None:
    real, own = report.short_version, question.situation.version
    if question.engine.name != "vllm" or real is None or real == own:
        return None
    text = f"{real[0]}.{real[1]}"
    planned = "newest" if own is None else f"{own[0]}.{own[1]}"
    return Step("engine version", planned, text, "--engine-version", question.changed(version=real))


def _memory(question: Question, report: EngineReport) -> Step | None:
    total, own = report.device_bytes, question.situation.memory_bytes
    if not total or abs(total - own) <= _NEAR * own:
        return None
    device = replace(question.situation.device, memory_bytes=total, memory_measured=True)
    moved = question.changed(device_memory_bytes=total)
    moved = replace(moved, situation=replace(moved.situation, device=device))
    return Step("device memory", f"{own / 2**30:.2f} GiB", f"{total / 2**30:.2f} GiB", None, moved)


def _share(question: Question, report: EngineReport) -> Step | None:
    real, own = report.utilization, question.engine.share(question.situation)
    if report.only_named and real is None:
        default = question.changed(utilization=None)
        real = default.engine.share(default.situation)
    if real is None or own is None or real == own:
        return None
    moved = question.changed(utilization=real)
    return Step(question.engine.share_name, f"{own:g}", f"{real:g}", "--utilization", moved)


def _eager(question: Question, report: EngineReport) -> Step | None:
    if report.eager is None or report.eager == question.situation.eager:
        return None
    words = {True: "on", False: "off"}
    return Step(
        "enforce_eager", words[not report.eager], words[report.eager], None, question.changed(eager=report.eager)
    )


def _length(question: Question, report: EngineReport) -> Step | None:
    real, own = report.max_model_len, question.workload.context
    if not real or real == own:
        return None
    moved = question.changed(context=real, shared_prefix=min(question.workload.shared_prefix, real - 1))
    return Step("max_model_len", f"{own:,}", f"{real:,}", "--context", moved)


def _slots(question: Question, report: EngineReport) -> Step | None:
    real, own = report.max_num_seqs, question.workload.concurrency
    if question.engine.name not in SLOT_ENGINES or not real or real == own:
        return None
    return Step("slots", str(own), str(real), "--concurrency", question.changed(concurrency=real))


def _setting(name: str) -> Rule:
    """The rule of a field that EngineSettings and EngineReport both have."""

    def rule(question: Question, report: EngineReport) -> Step | None:
        real, own = getattr(report, name), getattr(question.settings, name)
        defaults = report.only_named and name == "max_num_seqs"
        if real == own or (real is None and not defaults):
            return None
        if name == "max_num_seqs" and question.engine.name in SLOT_ENGINES:
            return None
        if name == "block_size" and question.engine.name == "vllm" and real > _LONGEST_BLOCK:
            return None
        if name == "kv_cache_dtype" and any({real, own} <= same for same in _SAME_KV):
            return None
        moved = question.changed(**{name: real})
        return Step(name, str(own or "default"), str(real or "default"), _OPTIONS[name] if real else None, moved)

    return rule
