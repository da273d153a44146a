"""The whole sweep: which loads in which order, when it is enough, and what is kept if it ends early."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from anaphora.errors import ConfigError, ProbeError
from anaphora.probes.client import ProbeClient
from anaphora.probes.engines import Engine, detect
from anaphora.probes.figures import ServiceLevel, StepResult, summarise
from anaphora.probes.knee import Knee, StepTimes, find_knee
from anaphora.probes.limits import Limit, find_limit, past_the_knee
from anaphora.probes.load import Sender, closed_loop, open_loop
from anaphora.probes.predicted import Comparison, PlanFile, compare
from anaphora.probes.step import ERRORS_ALLOWED, Kind, StepBounds, StepRecorder
from anaphora.probes.verify.prompts import PromptMaker, Scale, measure_scale
from anaphora.probes.workload import Fitting, Workload

Progress = Callable[[str, int, int | None], None]

MOST_IN_FLIGHT = 1024
"""Of an open loop; a server that has so many unanswered is past its knee."""
FALLEN_BEHIND = 0.85
"""Answers per request sent, below which an open loop's queue grows without end."""
REFINEMENTS = 2
_IGNORES_EOS = {"anaphora", "vllm", "sglang", "llama.cpp"}
"""Engines that take `ignore_eos`, so that outputs have the length asked for."""


@dataclass(frozen=True, slots=True)
class Loads:
    """The steps, in order. `gaps`: the knee may be looked for between two of them."""

    kind: Kind
    levels: tuple[float, ...]
    gaps: bool = False

    @classmethod
    def parse(cls, text: str, kind: Kind) -> Loads:
        """`1:64` doubles, `10:50:10` adds, `1,2,3` is a list; one number is one step. Raises ConfigError."""
        option = f"--{kind}"
        number = r"\d+" if kind == "concurrency" else r"\d+(?:\.\d+)?"
        match = re.fullmatch(rf"({number}):({number})(?::({number}))?", text.strip())
        if match is not None:
            low, high = float(match[1]), float(match[2])
            step = float(match[3]) if match[3] else None
            if 0 < low <= high and step != 0:
                return cls(kind, tuple(_range(low, high, step)), gaps=step is None)
        elif re.fullmatch(rf"{number}(,{number})*", text.strip()):
            levels = sorted({float(one) for one in text.split(",")})
            if levels[0] > 0 and len(levels) <= 100:
                return cls(kind, tuple(levels))
        whole = "whole numbers" if kind == "concurrency" else "requests per second"
        raise ConfigError(
            f"{option} {text!r} cannot be read; give {whole} above 0 as 1:64 (doubling), 10:50:10 (adding) or 1,2,4"
        )


@dataclass(slots=True)
class Sweep:
    """What is asked, and everything measured so far. State changes: filled in by `measure`."""

    loads: Loads
    make_workload: Callable[[Scale], Workload]
    slo: ServiceLevel | None = None
    plan: PlanFile | None = None
    bounds: StepBounds = field(default_factory=StepBounds)
    max_seconds: float = 600.0
    max_requests: int = 10_000
    seed: int = 0
    engine: Engine = field(default_factory=Engine)
    model: str | None = None
    scale: Scale | None = None
    workload: str = ""
    skipped: int = 0
    """Requests of the workload that were longer than the server's context."""
    sent: int = 0
    steps: list[StepResult] = field(default_factory=list)
    """In order of load."""
    stopped: str = ""
    """Why there are no further steps."""

    def knee(self) -> Knee | None:
        return find_knee([StepTimes(step.level, step.ttfts) for step in self.steps], seed=self.seed)

    def limit(self, knee: Knee | None) -> Limit | None:
        return find_limit(self.steps, knee, engine=self.engine.name) if self.steps else None

    def comparison(self, knee: Knee | None, limit: Limit | None) -> Comparison | None:
        return compare(self.plan, self.steps, knee, limit) if self.plan and limit else None

    def best(self) -> StepResult | None:
        """The highest load at which nine of ten requests met the service level, without a lower one that failed."""
        found = None
        for step in self.steps:
            if step.slo_share is None or step.slo_share < 0.9:
                break
            found = step
        return found


async def measure(state: Sweep, client: ProbeClient, progress: Progress) -> None:
    """Fill `state`. Raises ProbeError if nothing can be measured, ConfigError where the requests cannot fit."""
    progress("looking at the server", 0, None)
    deadline = time.perf_counter() + state.max_seconds
    state.engine = await detect(client)
    state.model = await client.choose_model()
    state.scale = await measure_scale(client, state.model, PromptMaker(state.seed))
    workload = state.make_workload(state.scale)
    state.workload = workload.description
    jobs = Fitting(workload, await _context(client, state.model))
    extra = {"ignore_eos": True} if state.engine.name in _IGNORES_EOS and not state.engine.gateway else {}
    async with Sender(client, state.model, extra) as send:
        run = _Run(state, client, send, jobs, deadline, progress)
        try:
            await run.all_steps()
        finally:
            state.skipped = jobs.skipped


class _Run:
    """Steps against one endpoint until one of the bounds."""

    def __init__(
        self, state: Sweep, client: ProbeClient, send: Sender, jobs: Fitting, deadline: float, progress: Progress
    ) -> None:
        self._state, self._client, self._send, self._jobs = state, client, send, jobs
        self._deadline, self._progress = deadline, progress

    async def all_steps(self) -> None:
        state = self._state
        for level in state.loads.levels:
            result = await self._step(level)
            state.stopped = self._enough(result)
            if state.stopped:
                break
        else:
            state.stopped = "all loads were tried"
        for _ in range(REFINEMENTS if state.loads.gaps else 0):
            middle = self._between()
            if middle is None or self._bounded():
                break
            await self._step(middle)

    async def _step(self, level: float) -> StepResult:
        state, bounds = self._state, self._state.bounds
        left = state.max_requests - state.sent
        kind = state.loads.kind
        recorder = StepRecorder(
            kind, level, StepBounds(bounds.precision, bounds.seconds, bounds.requests, left, self._deadline)
        )
        watch = asyncio.create_task(recorder.watch(self._client))
        shown = asyncio.create_task(self._show(recorder))
        try:
            if kind == "concurrency":
                await closed_loop(self._send, self._jobs, round(level), recorder, spread=self._spread())
            elif await open_loop(self._send, self._jobs, level, recorder, seed=self._seed(level), most=MOST_IN_FLIGHT):
                recorder.end("flooded")
        except BaseException:
            recorder.end("interrupted")
            raise
        finally:
            recorder.stop.set()
            shown.cancel()
            await asyncio.gather(watch, shown, return_exceptions=True)
            state.sent += len(recorder.outcomes)
            result = summarise(recorder, state.slo)
            if result.requests or result.unfinished:
                state.steps = sorted([*state.steps, result], key=lambda step: step.level)
        if not any(step.ttft for step in state.steps):
            raise next((o.error for o in recorder.outcomes if o.error is not None), None) or ProbeError(
                "No request was answered within a step's time; give more --step-seconds, or ask for fewer tokens.",
                kind="no_answers",
            )
        self._progress(said(result), result.requests, None)
        return result

    async def _show(self, recorder: StepRecorder) -> None:
        name = said_load(recorder.kind, recorder.level)
        while True:
            measured = len(recorder.measured)
            self._progress(f"{name}: measuring" if measured else f"{name}: warming up", measured, None)
            await asyncio.sleep(0.25)

    def _seed(self, level: float) -> int:
        return self._state.seed + round(1000 * level)

    def _spread(self) -> float:
        last = max(self._state.steps, key=lambda step: step.level, default=None)
        return min(last.e2e.p50, self._state.bounds.seconds / 4) if last is not None and last.e2e else 0.0

    def _bounded(self) -> str:
        if time.perf_counter() >= self._deadline:
            return f"--max-seconds {self._state.max_seconds:g} was reached"
        if self._state.sent >= self._state.max_requests:
            return f"--max-requests {self._state.max_requests:,} was reached"
        return ""

    def _enough(self, last: StepResult) -> str:
        """Why the sweep should end after this step; empty to go on."""
        steps = self._state.steps
        cut = bool(self._bounded())  # then it is the bound that left requests unfinished
        if last.kind == "concurrency" and last.unfinished > last.requests and not cut:
            return f"most requests took longer than a step may at {said_load(last.kind, last.level)}"
        if last.ended == "errors" or last.error_share > ERRORS_ALLOWED:
            return f"more than {ERRORS_ALLOWED:.0%} of the requests failed at {said_load(last.kind, last.level)}"
        if last.kind == "rate":
            behind = [step.ended == "flooded" or step.ttft is None or fell_behind(step) for step in steps]
            if last.ended == "flooded" or (all(behind[-2:]) and len(behind) > 1):
                return "the server falls behind this rate: its queue grows without end"
        elif past_the_knee(steps):
            return "clearly past the knee: twice no more throughput, only longer waits"
        return self._bounded()

    def _between(self) -> float | None:
        """A load in the widest gap next to the knee, half-way on a logarithmic scale; None where none is left."""
        knee = self._state.knee()
        if knee is None:
            return None
        levels = [step.level for step in self._state.steps]
        gaps = [(b / a, a, b) for a, b in pairwise(levels) if a == knee.step or b == knee.step]
        for ratio, low, high in sorted(gaps, key=lambda gap: (gap[1] != knee.step, -gap[0])):
            middle = math.sqrt(low * high)
            middle = float(round(middle)) if self._state.loads.kind == "concurrency" else float(f"{middle:.3g}")
            if ratio > 1.25 and low < middle < high:
                return middle
        return None


def fell_behind(step: StepResult) -> bool:
    """Whether an open loop's answers did not keep up with its requests."""
    if step.kind != "rate" or step.requests + step.unfinished < 20:
        return False
    return step.requests_per_second < FALLEN_BEHIND * step.level


def said_load(kind: Kind, level: float) -> str:
    return f"concurrency {level:g}" if kind == "concurrency" else f"{level:g} requests/s"


def said(step: StepResult) -> str:
    """A step in one line."""
    times = "no answers" if step.ttft is None else f"TTFT p50 {1e3 * step.ttft.p50:,.0f} ms"
    errors = f", {sum(step.errors.values())} errors" if step.errors else ""
    return f"{said_load(step.kind, step.level)}: {times}, {step.output_tokens_per_second:,.0f} tokens/s{errors}"


async def _context(client: ProbeClient, model: str) -> int | None:
    """The longest request by /v1/models, where it says so (vLLM, SGLang, Anaphora)."""
    try:
        entries = await client.models()
    except ProbeError:
        return None
    found = next((entry.get("max_model_len") for entry in entries if entry.get("id") == model), None)
    return found if isinstance(found, int) and found > 0 else None


def _range(low: float, high: float, step: float | None) -> Iterator[float]:
    """Doubling or adding; the end itself is in it. At most 100 steps."""
    at = low
    for _ in range(99):
        if at >= high * (1 - 1e-9):
            break
        yield at
        at = at * 2 if step is None else at + step
    yield high
