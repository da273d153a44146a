"""A plan as plain data: everything the terminal shows, under stable names."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from anaphora.geometry.weights import SCHEMES
from anaphora.planning.anaphora_pool import bytes_per_token
from anaphora.planning.kv_types import KVType, kv_types
from anaphora.planning.offload import Offload, offload
from anaphora.planning.overhead import Estimate
from anaphora.planning.plan import Answer, Question, answer, grid, longest_context, model_limit, most_requests
from anaphora.planning.recommend import RuleOfThumb, Setting, recommend, rule_of_thumb
from anaphora.planning.ways_out import WayOut, ways_out

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Report:
    """A whole plan."""

    question: Question
    answer: Answer
    longest_context: int
    most_requests: int
    ways_out: tuple[WayOut, ...]
    kv_types: tuple[KVType, ...]
    recommended: tuple[Setting, ...]
    rule: RuleOfThumb
    offload: Offload
    remarks: tuple[str, ...]

    @property
    def weights_missing(self) -> int:
        """Bytes by which weights and overhead alone are too large; 0 when they fit."""
        return max(0, -self.answer.budget.available.likely)

    @property
    def smallest_weights(self) -> tuple[str, int] | None:
        """(scheme, bytes) of the least the weights can take; None where they cannot be counted."""
        geometry = self.question.geometry
        sizes = [(size, name) for name in SCHEMES if (size := geometry.weight_bytes(name)) is not None]
        return (min(sizes)[1], min(sizes)[0]) if sizes else None


def make_report(question: Question, remarks: list[str]) -> Report:
    """Answer, limits, ways out and advice. Raises ConfigError, UnsupportedModel."""
    now = answer(question)
    context = question.workload.context
    prefix = question.workload.shared_prefix or context
    per_request = question.geometry.sequence_bytes(prefix, _element(question))
    ranks = question.settings.tensor_parallel_size
    return Report(
        question,
        now,
        longest_context(question),
        most_requests(question),
        () if now.fits else tuple(ways_out(question)),
        tuple(kv_types(question)),
        tuple(recommend(question, now)),
        rule_of_thumb(question, now),
        offload(question.geometry, question.situation.device, prefix, per_request // ranks, ranks),
        tuple(remarks),
    )


def as_json(report: Report, with_grid: bool) -> dict[str, Any]:
    """JSON-ready; bytes are bytes."""
    question, now = report.question, report.answer
    settings, situation = question.settings, question.situation
    found: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "command": "plan",
        "model": question.model,
        "architecture": question.geometry.architecture,
        "assumed_full_attention": question.geometry.assumed_full_attention,
        "engine": question.engine.name,
        "hardware": {
            "id": situation.device.id,
            "name": situation.device.name,
            "count": situation.devices,
            "memory_bytes": situation.device.memory_bytes,
            "memory_measured": situation.device.memory_measured,
        },
        "workload": asdict(question.workload),
        "settings": {
            "tensor_parallel_size": settings.tensor_parallel_size,
            "pipeline_parallel_size": settings.pipeline_parallel_size,
            "kv_cache_dtype": settings.kv_cache_dtype,
            "quantization": situation.quantization,
            "share": question.engine.share(situation),
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
        },
        "fits": now.fits,
        "fits_surely": now.surely,
        "memory": _memory(now),
        "kv": {
            "bytes_per_token": _bytes_per_token(question),
            "block_bytes": now.capacity.block_bytes,
            "block_size": now.capacity.block_size,
            "num_blocks": now.capacity.num_blocks,
            "tokens": now.capacity.tokens,
            "request_bytes": now.capacity.request_bytes,
            "needed_bytes": now.needed_bytes,
            "reuse_step": now.capacity.reuse_step,
            "saved_by_shared_prefix_bytes": now.saved_bytes,
            "groups": [asdict(group) for group in now.capacity.groups],
        },
        "requests_that_fit": {"likely": now.requests, "low": now.requests_surely, "high": now.requests_perhaps},
        "longest_context": report.longest_context,
        "most_requests": report.most_requests,
        "model_limit": model_limit(question.geometry),
        "ways_out": [
            {
                "change": way.change,
                "options": way.settings,
                "enough": way.enough,
                "requests_that_fit": way.answer.requests,
                "needed_bytes": way.answer.needed_bytes,
                "available_bytes": way.answer.available_bytes,
                "cost": way.cost,
            }
            for way in report.ways_out
        ],
        "kv_types": [asdict(each) for each in report.kv_types],
        "recommended": [asdict(setting) for setting in report.recommended],
        "rule_of_thumb": asdict(report.rule),
        "offload": asdict(report.offload) | {"pays": report.offload.pays},
        "remarks": list(report.remarks),
    }
    if with_grid:
        contexts, concurrencies, rows = grid(question)
        found["grid"] = {
            "contexts": contexts,
            "concurrencies": concurrencies,
            "part_of_available": [[None if part == float("inf") else round(part, 4) for part in row] for row in rows],
        }
    return found


def _memory(now: Answer) -> dict[str, Any]:
    return {
        "device_bytes": now.budget.device_bytes,
        "allowed_bytes": now.budget.allowed_bytes,
        "allowed_rule": now.budget.allowed_rule,
        "parts": [{"name": part.name, "inside": part.inside} | _estimate(part.bytes) for part in now.budget.parts],
        "available_for_kv": _estimate(now.budget.available),
        "free_bytes": now.free_bytes,
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {"bytes": estimate.likely, "low": estimate.low, "high": estimate.high, "source": estimate.source}


def _element(question: Question) -> int:
    """Whole bytes of a number of the KV cache; the engine's blocks count fractions exactly."""
    name = question.settings.kv_cache_dtype
    if name == "auto":
        return question.settings.model_dtype_bytes if question.engine.name != "llama.cpp" else 2
    return 1 if name.startswith(("fp8", "int", "k8", "q8")) else 2


def _bytes_per_token(question: Question) -> int:
    if question.engine.name == "anaphora":
        return bytes_per_token(question.geometry, question.settings)
    return question.geometry.bytes_per_token(_element(question))
