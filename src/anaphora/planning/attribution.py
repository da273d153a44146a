"""Predicted against real: where the difference in tokens comes from, and which estimate it would correct.

The plan is first moved to the settings the engine runs with, then to the bytes it reports, one part after the other;
the tokens between two stations are that part's. So the parts add up to the difference, whatever their order of size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anaphora.errors import ConfigError
from anaphora.geometry.units import human_bytes
from anaphora.planning.alignment import SLOT_ENGINES, Step, align
from anaphora.planning.engine_report import EngineReport
from anaphora.planning.overhead import Budget, Estimate
from anaphora.planning.plan import Answer, Question, answer
from anaphora.planning.protocol import Capacity

Move = Callable[[str, str, str, int, bool | None, str | None], None]
"""(cause, predicted, reported, effect on the bytes for KV, within, corrects): a step on the way to the real bytes."""
_CONCURRENCY_TIMES_LENGTH = (0, 21)
"""Since then vLLM prints concurrency x max_model_len; before, the tokens of one group's blocks."""
_LARGE = 1 << 44
"""Bytes in which whole blocks no longer matter."""
_ADVICE = {
    "weights": "give the model's folder (its headers hold the exact bytes) or --quantization",
    "activations": "set --max-num-batched-tokens and --max-num-seqs as the engine runs",
    "libraries": "an estimate from public logs; yours differs",
    "CUDA graphs": "an estimate from public logs; fewer capture sizes or enforce_eager take less",
    "compute buffer": "set --max-num-batched-tokens to the engine's -ub",
}
_REST = {
    "vllm": "activations, libraries and graphs together",
    "sglang": "libraries and rounding",
    "anaphora": "memory free at the start, or --kv-memory",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One cause. Effects are real minus predicted."""

    cause: str
    predicted: str
    reported: str
    kv_bytes: int
    """What it adds to the memory for KV."""
    tokens: int
    """What it adds to the tokens of the cache."""
    within: bool | None = None
    """Whether the real figure lies in the estimate's interval; None where there is no interval."""
    corrects: str | None = None
    """The estimate it would correct, and how."""


@dataclass(frozen=True, slots=True)
class Attribution:
    """The whole difference. The tokens of `differences` add up to reported - predicted."""

    predicted: Answer
    aligned: Answer
    """The prediction for the settings the engine runs with."""
    report: EngineReport
    predicted_tokens: int
    aligned_tokens: int
    reported_tokens: int
    differences: tuple[Difference, ...]
    remarks: tuple[str, ...]

    @property
    def error(self) -> float:
        """(predicted for the real settings - reported) / reported."""
        return (self.aligned_tokens - self.reported_tokens) / self.reported_tokens if self.reported_tokens else 0.0

    @property
    def inside(self) -> bool:
        """Whether the real figure lies in the interval of the prediction for the real settings."""
        if self.report.engine in SLOT_ENGINES:
            return all(item.within is not False for item in self.differences)
        question, available = self.aligned.question, self.aligned.budget.available
        low, high = (tokens_at(question, count, self.report) for count in (available.low, available.high))
        return low <= self.reported_tokens <= high


def attribute(predicted: Answer, report: EngineReport) -> Attribution:
    """Explain the report by the plan. Raises ConfigError where they are of different engines or nothing compares."""
    question = predicted.question
    if report.engine != question.engine.name:
        raise ConfigError(
            f"{report.source} is of {report.engine}, the plan is for {question.engine.name}; "
            f"give --engine {report.engine}"
        )
    steps = align(question, report)
    aligned = answer(steps[-1].question) if steps else predicted
    before = _predicted_tokens(predicted, report)
    found, tokens = _settings(predicted, steps, report)
    reported = _reported_tokens(aligned, report)
    if question.engine.name in SLOT_ENGINES:
        found += _slots(aligned, report, reported - tokens)
    else:
        found += _parts(aligned, report, tokens, reported)
    return Attribution(
        predicted, aligned, report, before, tokens, reported, tuple(found), (*report.remarks, *_others(report))
    )


def tokens_at(question: Question, available: int, report: EngineReport) -> int:
    """The figure the engine would print for so many bytes. Raises ConfigError, UnsupportedModel."""
    return _printed(question.engine.capacity(question.situation, max(0, available)), report)


def _printed(capacity: Capacity, report: EngineReport) -> int:
    version = report.short_version
    older = report.engine == "vllm" and version is not None and version < _CONCURRENCY_TIMES_LENGTH
    return capacity.tokens_older if older else capacity.tokens


def _predicted_tokens(found: Answer, report: EngineReport) -> int:
    """Slots are allotted as asked, not as they fit."""
    if found.question.engine.name in SLOT_ENGINES:
        return found.capacity.block_size * found.question.workload.concurrency
    return _printed(found.capacity, report)


def _reported_tokens(aligned: Answer, report: EngineReport) -> int:
    if report.tokens is not None:
        return report.tokens
    available = _reported_bytes(aligned, report)
    return tokens_at(aligned.question, available, report)


def _reported_bytes(aligned: Answer, report: EngineReport) -> int:
    """For KV: as printed, else from blocks, else from tokens. Raises ConfigError where none is known."""
    capacity = aligned.capacity
    if report.num_blocks is not None and (report.available_bytes is None or report.precision > 1):
        exact = report.num_blocks * capacity.block_bytes
        if (
            report.available_bytes is None
            or abs(exact - report.available_bytes) <= capacity.block_bytes + report.precision
        ):
            return exact
    if report.available_bytes is not None:
        return report.available_bytes
    if report.tokens is not None:
        large = tokens_at(aligned.question, _LARGE, report)
        return report.tokens * _LARGE // max(1, large)
    raise ConfigError(
        f"{report.source} says neither bytes, blocks nor tokens of the cache; give the whole start-up log"
    )


def _settings(predicted: Answer, steps: list[Step], report: EngineReport) -> tuple[list[Difference], int]:
    """The effect of each setting that differs, and the tokens predicted for all of them together."""
    found: list[Difference] = []
    earlier, tokens = predicted, _predicted_tokens(predicted, report)
    for step in steps:
        moved = answer(step.question)
        now = _predicted_tokens(moved, report)
        effect = moved.budget.available.likely - earlier.budget.available.likely
        if effect or now != tokens:
            corrects = f"plan with {step.option} {step.real.replace(',', '')}" if step.option else None
            cause = f"setting {step.name}"
            found.append(Difference(cause, step.planned, step.real, effect, now - tokens, None, corrects))
        earlier, tokens = moved, now
    return found, tokens


def _parts(aligned: Answer, report: EngineReport, tokens: int, reported: int) -> list[Difference]:
    """From the predicted bytes to the reported ones, part by part, then from bytes to the printed tokens."""
    budget, question = aligned.budget, aligned.question
    available, real = budget.available.likely, _reported_bytes(aligned, report)
    found: list[Difference] = []

    def move(cause: str, was: str, now: str, effect: int, within: bool | None, corrects: str | None) -> None:
        nonlocal available, tokens
        after = tokens_at(question, available + effect, report)
        found.append(Difference(cause, was, now, effect, after - tokens, within, corrects))
        available, tokens = available + effect, after

    if report.allowed_bytes is not None and abs(report.allowed_bytes - budget.allowed_bytes) > report.precision:
        cause = "memory free at the start (other processes, CUDA context)" if report.engine == "sglang" else "share"
        effect = report.allowed_bytes - budget.allowed_bytes
        move(cause, human_bytes(budget.allowed_bytes), human_bytes(report.allowed_bytes), effect, None, None)
    unknown: list[tuple[str, Estimate]] = []
    for part in budget.parts:
        size = report.parts.get(part.name)
        if not part.inside:
            continue
        if size is None:
            unknown.append((part.name, part.bytes))
            continue
        within = part.bytes.low - report.precision <= size <= part.bytes.high + report.precision
        corrects = None if within else f"{part.name}: {_ADVICE.get(part.name, 'an estimate')}"
        move(part.name, _interval(part.bytes), human_bytes(size), part.bytes.likely - size, within, corrects)
    _rest(budget, report, unknown, real - available, move)
    found.append(_rounding(aligned, report, real, reported - tokens))
    return found


def _rest(budget: Budget, report: EngineReport, unknown: list[tuple[str, Estimate]], effect: int, move: Move) -> None:
    """The bytes no printed figure explains: the parts that the engine does not tell apart, or other processes."""
    if unknown and report.engine != "anaphora":
        likely = sum(item.likely for _, item in unknown)
        low, high = sum(item.low for _, item in unknown), sum(item.high for _, item in unknown)
        room = int(budget.device_bytes * budget.spread) if report.device_bytes is None else report.precision
        taken = likely - effect
        within = low - room <= taken <= high + room
        names = ", ".join(name for name, _ in unknown)
        text = f"{names}: their interval, or what other processes hold" if not within else None
        cause = _REST[report.engine] if len(unknown) > 1 else names
        move(f"{cause} (deduced)", _interval(Estimate(likely, low, high, "")), human_bytes(taken), effect, within, text)
    elif abs(effect) > 0:
        known = report.engine == "anaphora"
        few = abs(effect) <= report.precision * (len(report.parts) + 2)
        cause = _REST["anaphora"] if known else "printed figures are rounded" if few else "other processes, or not told"
        move(cause, "", "", effect, None, None)


def _rounding(aligned: Answer, report: EngineReport, real: int, rest: int) -> Difference:
    """From bytes to tokens: whole blocks, and the precision the bytes were printed with."""
    question = aligned.question
    capacity = question.engine.capacity(question.situation, max(0, real))
    unused = real - capacity.num_blocks * capacity.block_bytes
    per_byte = _printed(capacity, report) / real if real > 0 else 0.0
    slack = capacity.block_size * max(1, len(capacity.groups)) + report.precision * per_byte
    expected = abs(rest) <= slack
    corrects = None
    if not expected:
        corrects = (
            "the engine makes other tokens of the same bytes: another KV dtype, a speculative draft in the pool, ranks "
            "of unequal memory, or a rule of that version"
        )
    return Difference(
        "block rounding",
        f"{capacity.num_blocks:,} blocks of {human_bytes(capacity.block_bytes)}",
        f"{human_bytes(max(0, unused))} unused",
        -max(0, unused),
        rest,
        expected,
        corrects,
    )


def _slots(aligned: Answer, report: EngineReport, rest: int) -> list[Difference]:
    """llama.cpp allots what it is told: the cache is compared in bytes, the rest takes from what stays free."""
    found = []
    predicted = aligned.capacity.block_bytes * aligned.question.workload.concurrency
    if report.available_bytes is not None:
        gap = report.available_bytes - predicted
        same = abs(gap) <= report.precision * 2
        text = (
            None
            if same
            else "another KV type, unified cache, or layers that keep other cells; check -ctk/-ctv and -kvu"
        )
        found.append(
            Difference("KV cache", human_bytes(predicted), human_bytes(report.available_bytes), gap, rest, same, text)
        )
    elif rest:
        found.append(Difference("cells", "", "", 0, rest, False, "the server rounds or caps its context"))
    for part in aligned.budget.parts:
        size = report.parts.get(part.name)
        if size is None:
            continue
        within = part.bytes.low - report.precision <= size <= part.bytes.high + report.precision
        corrects = None if within else f"{part.name}: {_ADVICE.get(part.name, 'an estimate')}"
        found.append(Difference(part.name, _interval(part.bytes), human_bytes(size), 0, 0, within, corrects))
    return found


def _interval(estimate: Estimate) -> str:
    if estimate.low == estimate.high:
        return human_bytes(estimate.likely)
    return f"{human_bytes(estimate.likely)} ({human_bytes(estimate.low)} to {human_bytes(estimate.high)})"


def _others(report: EngineReport) -> list[str]:
    """What other processes held at the start, where the engine says it."""
    if report.free_bytes is None or report.device_bytes is None:
        return []
    used = report.device_bytes - report.free_bytes
    if used <= 1 << 30:
        return []
    return [
        f"{human_bytes(used)} were in use before the engine started: its share counts the whole device, so a start "
        "fails once share x memory is more than what is free"
    ]
