"""A plan moved, setting by setting, to what an engine really runs with: each step's effect is its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from anaphora.errors import AnaphoraError
from anaphora.planning.engine_report import EngineReport
from anaphora.planning.plan import Question

Move = Callable[[Question], Question]
_SLOTS = ("llama.cpp", "ollama")
_NEAR = 0.001
"""Devices of memory as near as this are the same device."""


@dataclass(frozen=True, slots=True)
class Step:
    """One setting that differs."""

    name: str
    planned: str
    real: str
    question: Question
    """The plan with this and all earlier steps taken."""


def align(question: Question, report: EngineReport) -> list[Step]:
    """What differs between plan and engine, in the order it is set right. State changes: none."""
    steps: list[Step] = []
    for name, planned, real, moved in _candidates(question, report):
        current = steps[-1].question if steps else question
        try:
            steps.append(Step(name, planned, real, moved(current)))
        except AnaphoraError:
            continue  # a value the plan's own rules refuse is left to the rest
    return steps


def _candidates(question: Question, report: EngineReport) -> Iterator[tuple[str, str, str, Move]]:
    settings, situation = question.settings, question.situation
    version = report.short_version if question.engine.name == "vllm" else None
    if version and version != situation.version:
        planned = "newest" if situation.version is None else ".".join(map(str, situation.version))
        yield "engine version", planned, ".".join(map(str, version)), lambda q: q.changed(version=version)
    total = report.device_bytes
    if total and abs(total - situation.memory_bytes) > _NEAR * situation.memory_bytes:
        yield "device memory", _gib(situation.memory_bytes), _gib(total), lambda q: _on(q, total)
    if report.utilization is not None and report.utilization != question.engine.share(situation):
        planned = f"{question.engine.share(situation) or 0:g}"
        share = report.utilization
        yield question.engine.share_name, planned, f"{share:g}", lambda q: q.changed(utilization=share)
    if report.eager and not situation.eager:
        yield "enforce_eager", "off", "on", lambda q: q.changed(eager=True)
    if report.max_model_len and report.max_model_len != question.workload.context:
        length = report.max_model_len
        yield "max_model_len", f"{question.workload.context:,}", f"{length:,}", lambda q: _longer(q, length)
    slots = report.max_num_seqs
    if question.engine.name in _SLOTS and slots and slots != question.workload.concurrency:
        yield "slots", str(question.workload.concurrency), str(slots), lambda q: q.changed(concurrency=slots)
    for name in ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_dtype"):
        real, own = getattr(report, name), getattr(settings, name)
        if real is None or real == own or (name == "max_num_seqs" and question.engine.name in _SLOTS):
            continue
        if name == "kv_cache_dtype" and {real, own} <= {"auto", "f16", "float16", "bfloat16"}:
            continue
        if name == "block_size" and question.engine.name == "vllm" and real > 256:
            continue  # the engine's own, for a hybrid
        yield name, str(own or "default"), str(real), _setter(name, real)


def _setter(name: str, real: Any) -> Move:
    return lambda question: question.changed(**{name: real})


def _longer(question: Question, length: int) -> Question:
    return question.changed(context=length, shared_prefix=min(question.workload.shared_prefix, length - 1))


def _on(question: Question, total: int) -> Question:
    device = replace(question.situation.device, memory_bytes=total, memory_measured=True)
    moved = question.changed(device_memory_bytes=total)
    return replace(moved, situation=replace(moved.situation, device=device))


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
