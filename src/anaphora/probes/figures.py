"""The figures of a step: latencies by the project's definitions, throughput, and goodput under a service level."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from anaphora.errors import ConfigError
from anaphora.probes.load import Outcome
from anaphora.probes.statistics import quantile
from anaphora.probes.step import Ended, Engine, Kind, StepRecorder, error_counts
from anaphora.probes.stream import StreamResult

DEFINITIONS = {
    "TTFT": "first content chunk - request sent",
    "ITL": "gap between content chunks, each gap counted",
    "TPOT": "(last chunk - first chunk) / (tokens - 1), one per request",
    "E2E": "last chunk - request sent",
    "goodput": "requests per second that meet every limit of --slo (itl: 90% of a request's gaps)",
}

_LIMITS: dict[str, Callable[[StreamResult], float]] = {
    "ttft": lambda result: result.ttft,
    "itl": lambda result: quantile(result.itls, 0.9) if result.itls else 0.0,
    "tpot": lambda result: result.tpot or 0.0,
    "e2e": lambda result: result.e2e,
}


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Upper limits in seconds by name: ttft, itl, tpot, e2e."""

    text: str
    limits: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> ServiceLevel:
        """`ttft=500ms,itl=50ms`. Raises ConfigError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*([a-z0-9]+)\s*[=:<]\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", part.lower())
            if match is None or match[1] not in _LIMITS or match[1] in limits or not float(match[2]):
                raise ConfigError(
                    f"--slo {text!r} cannot be read at {part.strip()!r}; write it as ttft=500ms,itl=50ms "
                    f"with {', '.join(_LIMITS)}, each once, and ms or s"
                )
            limits[match[1]] = float(match[2]) / (1000 if match[3] == "ms" else 1)
        return cls(",".join(part.strip() for part in text.split(",")), limits)

    def met(self, result: StreamResult) -> bool:
        return all(_LIMITS[name](result) <= limit for name, limit in self.limits.items())


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds."""

    p50: float
    p90: float
    p99: float
    mean: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles | None:
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (quantile(ordered, q) for q in (0.5, 0.9, 0.99))
        return cls(p50, p90, p99, sum(values) / len(values), len(values))


@dataclass(slots=True)
class StepResult:
    """What one step found. Rates are per second of the window."""

    kind: Kind
    level: float
    ended: Ended
    seconds: float
    requests: int
    """Answered or failed, sent within the window."""
    errors: dict[str, int]
    error_example: str | None
    unfinished: int
    """Sent within the window and not done when the step's time was over."""
    precision: float
    ttft: Quantiles | None
    itl: Quantiles | None
    tpot: Quantiles | None
    e2e: Quantiles | None
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    in_flight: float
    """Requests in flight on average, by the sum of their times within the window."""
    prompt_tokens: float | None
    output_tokens: float | None
    cached_share: float | None
    """Of the prompt tokens, by the answers' usage; None where it does not say."""
    goodput: float | None = None
    slo_share: float | None = None
    core_share: float = 0.0
    lag: float = 0.0
    late: float = 0.0
    """Open loop: 99th percentile of how late requests went out."""
    chunks_per_read: float = 1.0
    incremental: bool = True
    engine: Engine = field(default_factory=Engine)
    ttfts: list[float] = field(default_factory=list)
    """In the order of sending; of a request that was still without its first token the time it had waited."""
    e2es: list[float] = field(default_factory=list)

    @property
    def error_share(self) -> float:
        return sum(self.errors.values()) / self.requests if self.requests else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Times in milliseconds, as their names say."""
        found = asdict(self)
        for name in ("ttft", "itl", "tpot", "e2e"):
            value = found.pop(name)
            found[f"{name}_ms"] = value and {k: v if k == "count" else 1e3 * v for k, v in value.items()}
        for name in ("lag", "late"):
            found[f"{name}_p99_ms"] = 1e3 * found.pop(name)
        found["ttfts_ms"] = [round(1e3 * value, 3) for value in found.pop("ttfts")]
        del found["e2es"]
        return {"load": found.pop("level"), **found, "error_share": self.error_share}


def summarise(recorder: StepRecorder, slo: ServiceLevel | None) -> StepResult:
    """The figures of a step that is over."""
    start, end = recorder.window
    now = time.perf_counter()
    measured = recorder.measured
    answered = [o.result for o in measured if o.result is not None]
    seconds = max(end - start, 1e-9) if math.isfinite(start) and math.isfinite(end) else 0.0
    output, prompt = _tokens_within(recorder.outcomes, start, end)
    met = sum(slo.met(result) for result in answered) if slo else 0
    completed = sum(1 for o in recorder.outcomes if o.result and o.ended is not None and start <= o.ended < end)
    chunks, reads = sum(len(r.chunk_times) for r in answered), sum(r.reads for r in answered)
    told = [r for r in answered if r.prompt_tokens is not None]
    cached = [r for r in told if r.cached_tokens is not None]
    prompts = sum(r.prompt_tokens or 0 for r in cached)
    late = [o.late for o in measured]
    per_second = 1 / seconds if seconds else 0.0
    return StepResult(
        recorder.kind,
        recorder.level,
        recorder.ended or "interrupted",
        seconds,
        len(measured),
        error_counts(measured),
        next((str(o.error) for o in recorder.outcomes if o.error is not None), None),
        sum(o.ended is None for o in recorder.sent_within),
        recorder.precision,
        Quantiles.of([r.ttft for r in answered]),
        Quantiles.of([gap for r in answered for gap in r.itls]),
        Quantiles.of([tpot for r in answered if (tpot := r.tpot) is not None]),
        Quantiles.of([r.e2e for r in answered]),
        completed * per_second,
        output * per_second,
        (output + prompt) * per_second,
        sum(_overlap(o, start, end) for o in recorder.outcomes) * per_second,
        sum(r.prompt_tokens or 0 for r in told) / len(told) if told else None,
        sum(_output_tokens(r) for r in answered) / len(answered) if answered else None,
        sum(r.cached_tokens or 0 for r in cached) / prompts if prompts else None,
        met / len(measured) * completed * per_second if slo and measured else None,
        met / len(measured) if slo and measured else None,
        recorder.client.core_share,
        recorder.client.lag,
        quantile(late, 0.99) if late else 0.0,
        chunks / reads if reads else 1.0,
        all(r.incremental for r in answered),
        recorder.engine,
        [ttft for o in recorder.sent_within if (ttft := _ttft_so_far(o, now)) is not None],
        [r.e2e for r in answered],
    )


def _output_tokens(result: StreamResult) -> int:
    return result.completion_tokens or len(result.chunk_times)


def _ttft_so_far(outcome: Outcome, now: float) -> float | None:
    """A lower bound where the first token had not come: without those a server that hangs would look fast."""
    if outcome.error is not None:
        return None
    if outcome.result is not None:
        return outcome.result.ttft
    return outcome.partial.chunk_times[0] if outcome.partial.chunk_times else now - outcome.started


def _tokens_within(outcomes: Sequence[Outcome], start: float, end: float) -> tuple[float, float]:
    """(output, prompt) tokens in the window: output where its chunks came, a prompt where its first chunk came."""
    output = prompt = 0.0
    for outcome in outcomes:
        result = outcome.result
        if result is None or not result.chunk_times:
            continue
        inside = sum(start <= result.sent + at < end for at in result.chunk_times)
        output += _output_tokens(result) * inside / len(result.chunk_times)
        if start <= result.sent + result.chunk_times[0] < end:
            prompt += result.prompt_tokens or outcome.job.prompt_tokens
    return output, prompt


def _overlap(outcome: Outcome, start: float, end: float) -> float:
    ended = end if outcome.ended is None else min(outcome.ended, end)
    return max(0.0, ended - max(outcome.started, start))
