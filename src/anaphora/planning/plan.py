"""Does the workload fit, and what is the most that does? One question, one answer; nothing is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from anaphora.errors import ConfigError
from anaphora.geometry.model import ModelGeometry
from anaphora.planning.capability import compute_capability, engine_device
from anaphora.planning.engines import Engine
from anaphora.planning.hardware import Device
from anaphora.planning.overhead import Budget, Situation
from anaphora.planning.overhead_vllm import default_batch
from anaphora.planning.protocol import Capacity, EngineSettings
from anaphora.planning.search import largest
from anaphora.planning.workload import Workload, needed_bytes, requests_that_fit

_UNBOUNDED = 1 << 22
"""Tokens; the longest context looked for where a model names no limit."""
MOST_REQUESTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Question:
    """Everything a plan depends on. `situation.settings.max_model_len` is the workload's context."""

    model: str
    engine: Engine
    situation: Situation
    workload: Workload

    @property
    def settings(self) -> EngineSettings:
        return self.situation.settings

    @property
    def geometry(self) -> ModelGeometry:
        return self.situation.geometry

    def changed(self, **changes: Any) -> Question:
        """The question with other values: fields of Workload, EngineSettings or Situation, by name.

        `max_num_seqs` follows the concurrency unless it was given apart from it.
        """
        own = {key: changes.pop(key) for key in ("context", "concurrency", "shared_prefix") if key in changes}
        workload = replace(self.workload, **own)
        inner = {key: changes.pop(key) for key in tuple(changes) if key in EngineSettings.__dataclass_fields__}
        inner.setdefault("max_model_len", workload.context)
        if self.settings.max_num_seqs == self.workload.concurrency:
            inner.setdefault("max_num_seqs", workload.concurrency)
        settings = replace(self.settings, **inner)
        return replace(self, workload=workload, situation=replace(self.situation, settings=settings, **changes))

    def on(self, device: Device, devices: int) -> Question:
        """The question on other devices, with as many ranks as there are."""
        changes: dict[str, Any] = {
            "device": device,
            "devices": devices,
            "device_memory_bytes": device.memory_bytes or 0,
            "compute_capability": compute_capability(device),
            "free_bytes": None,
        }
        if self.engine.splits_tensors:
            changes |= {"tensor_parallel_size": devices, "pipeline_parallel_size": 1}
        moved = replace_device(self, **changes)
        version = self.situation.version
        if self.engine.name == "vllm" and self.settings.max_num_batched_tokens == default_batch(self.settings, version):
            return moved.changed(max_num_batched_tokens=default_batch(moved.settings, version))
        return moved


def replace_device(question: Question, **changes: Any) -> Question:
    """`changed`, with the settings' own field `device` kept apart from the situation's."""
    device = changes.pop("device")
    moved = question.changed(**changes)
    settings = replace(moved.settings, device=engine_device(device))
    return replace(moved, situation=replace(moved.situation, device=device, settings=settings))


@dataclass(frozen=True, slots=True)
class Answer:
    """What comes out at the likely figure; `surely` and `perhaps` at the ends of the interval."""

    question: Question
    budget: Budget
    capacity: Capacity
    needed_bytes: int
    """KV bytes the workload takes on one device (llama.cpp: on all)."""
    requests: int
    """Requests of this context that fit at once."""
    requests_surely: int
    requests_perhaps: int
    saved_bytes: int
    """By the shared prefix."""

    @property
    def available_bytes(self) -> int:
        return max(0, self.budget.available.likely)

    @property
    def weights_fit(self) -> bool:
        """Whether anything is left once all but KV is loaded."""
        return self.budget.available.likely > 0

    @property
    def fits(self) -> bool:
        return self.weights_fit and self.requests >= self.question.workload.concurrency

    @property
    def surely(self) -> bool:
        """Whether it fits even where every estimate is at its bad end."""
        return self.requests_surely >= self.question.workload.concurrency

    @property
    def free_bytes(self) -> int:
        """Bytes of the device that nothing takes; negative when the parts outside the share do not fit."""
        inside = sum(part.bytes.likely for part in self.budget.parts if part.inside)
        return self.budget.device_bytes - inside - self.available_bytes - self.budget.beside


def answer(question: Question) -> Answer:
    """Budget, blocks and requests. Raises ConfigError, UnsupportedModel."""
    budget = question.engine.budget(question.situation)
    prefix = question.workload.shared_prefix

    def at(available: int) -> Capacity:
        return question.engine.capacity(question.situation, available)

    capacity = at(budget.available.likely)
    wanted = question.workload.concurrency
    # sized on a pool that is surely not empty, so that needs are known even where nothing is left
    sized = capacity if capacity.num_blocks > 0 else at(1 << 50)
    needed = needed_bytes(sized, wanted, prefix)
    return Answer(
        question,
        budget,
        capacity,
        needed,
        requests_that_fit(capacity, prefix),
        requests_that_fit(at(budget.available.low), prefix),
        requests_that_fit(at(budget.available.high), prefix),
        needed_bytes(sized, wanted) - needed,
    )


def model_limit(geometry: ModelGeometry) -> int | None:
    """The longest context the model itself allows; None when its config names none."""
    return geometry.trained_position or geometry.max_position


def check_context(geometry: ModelGeometry, context: int) -> None:
    """Raises ConfigError for a context beyond the model's, naming which limit it is."""
    limit = model_limit(geometry)
    if limit is None or context <= limit:
        return
    longer = geometry.max_position or 0
    if geometry.trained_position and context <= longer:
        raise ConfigError(
            f"--context {context} is beyond {limit}, the length this model was trained on before its LongRoPE scaling "
            f"(original_max_position_embeddings). Engines serve up to {longer} when told so; quality on short prompts "
            f"falls. Use {limit} or less, or pass --allow-long"
        )
    raise ConfigError(
        f"--context {context} is beyond this model's limit of {max(limit, longer)} tokens "
        f"({geometry.max_position_from}). Use {max(limit, longer)} or less, a config.json whose rope_scaling and "
        "max_position_embeddings extend it, or pass --allow-long"
    )


def longest_context(question: Question, concurrency: int | None = None) -> int:
    """The longest context at which that many requests fit; 0 when none does. Raises ConfigError."""
    wanted = concurrency or question.workload.concurrency
    available = question.engine.budget(question.situation).available.likely
    prefix = question.workload.shared_prefix

    def fits(length: int) -> bool:
        at = question.changed(context=length, shared_prefix=min(prefix, length - 1))
        found = requests_that_fit(question.engine.capacity(at.situation, available), min(prefix, length - 1))
        return found >= wanted

    return largest(model_limit(question.geometry) or _UNBOUNDED, fits) if available > 0 else 0


def most_requests(question: Question) -> int:
    """The most requests of the asked context, where more sequences also take more room beside KV."""

    def fits(count: int) -> bool:
        return answer(question.changed(concurrency=count)).fits

    start = answer(question).requests
    return largest(min(MOST_REQUESTS, max(1, 2 * start)), fits)


Grid = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[float, ...], ...]]


def grid(question: Question, widest: int = 10) -> Grid:
    """(contexts, concurrencies, part of the available bytes that each pair takes), by powers of two.

    Above 1 it does not fit; infinite where nothing is left for KV.
    """
    limit = model_limit(question.geometry) or _UNBOUNDED
    top = max(question.workload.context, min(limit, 1 << 17))
    contexts = [min(top, 1 << power) for power in range(9, 23) if 1 << (power - 1) < top][-widest:]
    most = max(64, question.workload.concurrency)
    concurrencies = [1 << power for power in range(most.bit_length() + (most & (most - 1) != 0))]
    available = question.engine.budget(question.situation).available.likely
    rows = []
    for context in contexts:
        prefix = min(question.workload.shared_prefix, context - 1)
        at = question.changed(context=context, shared_prefix=prefix)
        capacity = question.engine.capacity(at.situation, available if available > 0 else 1 << 50)
        rows.append(
            tuple(
                needed_bytes(capacity, count, prefix) / available if available > 0 else float("inf")
                for count in concurrencies
            )
        )
    return tuple(contexts), tuple(concurrencies), tuple(rows)
