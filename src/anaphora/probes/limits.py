"""What holds a server back at its knee, from the figures of a sweep: rules in order, the first that applies counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from anaphora.probes.figures import StepResult
from anaphora.probes.knee import Knee, Sureness
from anaphora.probes.statistics import median
from anaphora.probes.step import ERRORS_ALLOWED

LimitKind = Literal[
    "rate limit", "client", "KV full", "batch limit", "errors", "compute bound", "queue", "not reached", "unknown"
]

BUSY = 0.9
"""Share of a core from which on this process is the bottleneck: it cannot use more than one."""
FULL = 0.95
FLAT = 1.1
"""Throughput that grows by less from one step to the next is flat."""

_PLACES = {
    "vllm": "--max-num-seqs",
    "sglang": "--max-running-requests",
    "llama.cpp": "--parallel (each slot gets its share of --ctx-size)",
    "ollama": "OLLAMA_NUM_PARALLEL",
    "anaphora": "--max-num-seqs",
}
_KV = {
    "vllm": "--gpu-memory-utilization, --kv-cache-dtype fp8, --kv-offloading-size",
    "sglang": "--mem-fraction-static, --kv-cache-dtype fp8_e4m3",
    "llama.cpp": "--ctx-size, -ctk and -ctv q8_0",
    "ollama": "OLLAMA_CONTEXT_LENGTH, OLLAMA_KV_CACHE_TYPE=q8_0",
    "anaphora": "--kv-memory",
}


@dataclass(frozen=True, slots=True)
class Limit:
    """The reason, what speaks for it, and what to do."""

    kind: LimitKind
    sure: Sureness
    text: str
    evidence: tuple[str, ...]
    advice: str


@dataclass(frozen=True, slots=True)
class _Case:
    """The steps with answers in order of load, and those past the knee; without a knee only the highest."""

    steps: Sequence[StepResult]
    failed: Sequence[StepResult]
    """Steps in which too many requests failed."""
    past: Sequence[StepResult]
    before: StepResult
    knee: Knee | None
    engine: str

    @property
    def top(self) -> StepResult:
        return self.steps[-1]

    @property
    def usage(self) -> float | None:
        return max((s.engine.kv_usage for s in self.past if s.engine.kv_usage is not None), default=None)

    @property
    def flat(self) -> bool:
        """More load brought no more tokens, per doubling."""
        last = self.steps[-2:]
        if len(last) < 2 or not last[0].output_tokens_per_second:
            return False
        gain = last[1].output_tokens_per_second / last[0].output_tokens_per_second
        return gain < FLAT and last[1].level / last[0].level >= 1.2

    @property
    def places(self) -> float | None:
        """Requests that ran at most, where that number no longer grew with the load."""
        running = [(s.level, s.engine.running) for s in self.steps if s.engine.running]
        if len(running) < 2:
            return None
        (_, earlier), (load, most) = running[-2:]
        same = most <= earlier * 1.02
        beyond = self.top.kind == "rate" or load > most * 1.1
        return most if same and beyond else None


def find_limit(steps: Sequence[StepResult], knee: Knee | None, *, engine: str = "unknown") -> Limit:
    """`steps` in any order, at least one. `engine`: a name of `engines.TITLES`, for the advice."""
    steps = sorted(steps, key=lambda step: step.level)
    failed = [step for step in steps if step.error_share > ERRORS_ALLOWED]
    sound = [step for step in steps if step not in failed] or steps
    past = [step for step in sound if knee is not None and step.level > knee.step] or sound[-1:]
    before = next((s for s in reversed(sound) if knee is not None and s.level <= knee.step), sound[0])
    case = _Case(sound, failed, past, before, knee, engine)
    for rule in _RULES:
        found = rule(case)
        if found is not None:
            return found
    return _unreached(case)


def _rate_limit(case: _Case) -> Limit | None:
    refused = max((s.errors.get("http_429", 0) / s.requests for s in case.failed), default=0.0)
    if refused <= ERRORS_ALLOWED:
        return None
    return Limit(
        "rate limit",
        "certain",
        "The server (or a gateway before it) refuses requests above its rate limit.",
        (f"up to {refused:.0%} of a step's requests were answered with 429",),
        "Raise the limit of the key, or of the server's queue; below it this sweep says nothing about the engine.",
    )


def _client(case: _Case) -> Limit | None:
    busiest = max(case.past, key=lambda step: step.core_share)
    if busiest.core_share < BUSY:
        return None
    return Limit(
        "client",
        "certain",
        "This client is the limit, not the server: our own CPU is at 100%.",
        (
            f"this process used {busiest.core_share:.0%} of the one core it can use at load {busiest.level:g}",
            f"its event loop woke up {busiest.lag * 1e3:.0f} ms late (99th percentile)",
        ),
        "Sweep from a faster or less busy machine, or from two at once; the figures at this load are too pessimistic.",
    )


def _kv_full(case: _Case) -> Limit | None:
    preempted = sum(s.engine.preemptions or 0 for s in case.past)
    usage = case.usage
    running = max((s.engine.running for s in case.past if s.engine.running), default=None)
    waiting = any(s.engine.waiting for s in case.past)
    full = usage is not None and usage >= FULL
    if usage is not None and running and waiting:
        full = full or usage * (1 + 1 / running) > 1  # one more of the same size does not fit
    if not full and not preempted:
        return None
    evidence = []
    if usage is not None:
        each = f" with {running:,.0f} requests running" if running else ""
        evidence.append(f"KV memory was {usage:.0%} full{each}")
    if preempted:
        evidence.append(f"{preempted:,.0f} requests were preempted and had to be computed again")
    advice = _KV.get(case.engine, "the engine's share of memory, a smaller KV dtype")
    sure: Sureness = "certain" if full and preempted else "likely"
    return Limit(
        "KV full",
        sure,
        "The KV memory is full: more requests at once do not fit.",
        tuple(evidence),
        f"Give the KV cache more room or make it smaller ({advice}), or shorten the requests: see `anaphora plan`.",
    )


def _batch_limit(case: _Case) -> Limit | None:
    places = case.places
    waiting = max((s.engine.waiting or 0 for s in case.past), default=0)
    if places is None or not waiting:
        return None
    usage = case.usage
    evidence = [f"never more than {places:,.0f} requests ran at once, while up to {waiting:,.0f} waited"]
    if usage is not None:
        evidence.append(f"KV memory was only {usage:.0%} full")
    still = "" if case.flat else " Throughput was still growing."
    return Limit(
        "batch limit",
        "certain" if usage is not None else "likely",
        f"The batch is full at {places:,.0f} requests.{still}",
        tuple(evidence),
        f"Raise {_PLACES.get(case.engine, 'the limit of running requests')} while KV memory is free, and sweep again.",
    )


def _compute(case: _Case) -> Limit | None:
    if not case.flat:
        return None
    usage, top = case.usage, case.top
    running = [s.engine.running for s in case.steps[-2:] if s.engine.running]
    grew = len(running) == 2 and running[1] > running[0] * 1.1
    slower = _ratio(case, lambda s: s.itl.p50 if s.itl else None)
    if not grew and (slower is None or slower < 1.25):
        return None
    evidence = [f"output stayed at about {top.output_tokens_per_second:,.0f} tokens/s while the load grew"]
    if grew:
        evidence.append(f"the batch grew from {running[0]:,.0f} to {running[1]:,.0f} requests without giving more")
    if slower is not None and slower >= 1.25:
        evidence.append(f"the gap between two tokens is {slower:.1f} times that at load {case.before.level:g}")
    if usage is not None:
        evidence.append(f"KV memory was only {usage:.0%} full")
    return Limit(
        "compute bound",
        "certain" if usage is not None and grew else "likely",
        "The processor is the limit: a larger batch is only slower.",
        tuple(evidence),
        "A faster or further device, a smaller or quantised model, or fewer tokens (prefix caching) is what helps.",
    )


def _queue(case: _Case) -> Limit | None:
    top = case.top
    waited = max((s.engine.waiting or 0 for s in case.past), default=0)
    steady = _ratio(case, lambda s: s.itl.p50 if s.itl else None)
    grown = _ratio(case, lambda s: s.ttft.p50 if s.ttft else None)
    silent = top.engine.waiting is None and steady is not None and steady < 1.25 and (grown or 0) >= 1.5
    if not waited and not (case.flat and silent) and top.ended != "flooded":
        return None
    evidence = []
    if waited:
        evidence.append(f"up to {waited:,.0f} requests waited for their turn")
    if grown is not None and steady is not None:
        evidence.append(f"past the knee TTFT is {grown:.1f} times as long, the gap between tokens {steady:.1f} times")
    places = _served_at_once(top)
    if silent and places:
        evidence.append(f"by throughput and time about {places:.0f} requests are served at once")
    return Limit(
        "queue",
        "likely" if waited else "guess",
        "Requests wait in a queue before the server begins them: it takes only so many at once.",
        tuple(evidence),
        f"Its metrics would tell a batch limit from full KV memory; try a higher "
        f"{_PLACES.get(case.engine, 'limit of running requests')} first.",
    )


def _errors(case: _Case) -> Limit | None:
    if not case.failed:
        return None
    first = case.failed[0]
    kinds = ", ".join(f"{count} {kind}" for kind, count in first.errors.items())
    return Limit(
        "errors",
        "certain",
        f"The server fails before it is slow: {first.error_share:.0%} of the requests at load {first.level:g}.",
        (f"of {first.requests} requests there: {kinds}", *([first.error_example] if first.error_example else [])),
        "Its log has the reason; `anaphora doctor URL` looks at the way there.",
    )


def _unreached(case: _Case) -> Limit:
    growing = len(case.steps) < 2 or not case.flat
    if case.knee is None and growing:
        return Limit(
            "not reached",
            "likely",
            "No limit was reached: throughput was still growing at the highest load.",
            (f"{case.top.output_tokens_per_second:,.0f} output tokens/s at load {case.top.level:g}",),
            "Sweep on to higher loads.",
        )
    return Limit("unknown", "guess", "What limits the server cannot be told from outside.", (), "Open its /metrics.")


def _ratio(case: _Case, of: Callable[[StepResult], float | None]) -> float | None:
    """Median of the steps past the knee over that at the knee."""
    base = of(case.before)
    past = [value for step in case.past if (value := of(step)) is not None]
    return median(past) / base if past and base else None


def _served_at_once(step: StepResult) -> float | None:
    """Little's law for the time after the first token."""
    if step.e2e is None or step.ttft is None:
        return None
    return step.requests_per_second * (step.e2e.mean - step.ttft.mean)


_RULES = (_rate_limit, _client, _kv_full, _batch_limit, _errors, _compute, _queue)


def past_the_knee(steps: Sequence[StepResult]) -> bool:
    """Whether going on is pointless: twice in a row no more tokens, but a TTFT that grew by a third or more.

    `steps` in order of load.
    """
    last = steps[-3:]
    if len(last) < 3:
        return False
    return all(
        b.ttft is not None
        and a.ttft is not None
        and b.output_tokens_per_second < a.output_tokens_per_second * FLAT
        and b.ttft.p50 >= a.ttft.p50 * 1.33
        for a, b in pairwise(last)
    )
