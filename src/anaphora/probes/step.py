"""One step of a sweep: its load held until the median TTFT is known well enough, and what came of it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from anaphora.probes.client import ProbeClient
from anaphora.probes.counters import Counters, scrape
from anaphora.probes.load import Outcome
from anaphora.probes.statistics import median, quantile

Kind = Literal["concurrency", "rate"]
Ended = Literal["precise", "requests", "time", "errors", "flooded", "interrupted"]

ERRORS_ALLOWED = 0.05
_TICK = 0.02
_SCRAPE_EVERY = 1.0


@dataclass(frozen=True, slots=True)
class StepBounds:
    """When a step is over. The warm-up may take half of `seconds` more, the last answers as long again."""

    precision: float = 0.05
    """Half-width of the 95% interval of the median TTFT, relative to it."""
    seconds: float = 30.0
    requests: int = 500
    """Measured ones."""
    sent: float = math.inf
    """All, those of warm-up and tail too."""
    deadline: float = math.inf
    """On the clock of `time.perf_counter`, for the whole sweep."""


@dataclass(slots=True)
class ClientLoad:
    """How busy we were ourselves: a client that cannot keep up measures itself."""

    core_share: float = 0.0
    """CPU time of this process over the time on the clock; it uses one core at most."""
    lags: list[float] = field(default_factory=list)
    """Seconds by which the event loop woke up too late."""

    @property
    def lag(self) -> float:
        """99th percentile."""
        return quantile(self.lags, 0.99) if self.lags else 0.0


@dataclass(slots=True)
class Engine:
    """What the engine's own metrics said during a step; None where it does not say."""

    kv_usage: float | None = None
    running: float | None = None
    waiting: float | None = None
    """The largest values seen."""
    preemptions: float | None = None
    hit_share: float | None = None


class StepRecorder:
    """A recorder of `load`: warm-up, window, and a tail that keeps the load up until the window's requests are done.

    Warm-up: until every client of a closed loop has had its first answer; twice the first answer's time in an open
    one; if that takes half of the step's time, there is none. A request counts if it was sent within the window,
    however long it takes: what is cut off at the end would be the slow ones.
    """

    def __init__(self, kind: Kind, level: float, bounds: StepBounds) -> None:
        self.kind, self.level, self.bounds = kind, level, bounds
        self.stop = asyncio.Event()
        self.began = time.perf_counter()
        self.window: tuple[float, float] = (math.inf, math.inf)
        self.outcomes: list[Outcome] = []
        self.ended: Ended | None = None
        self.precision = math.inf
        self.client = ClientLoad()
        self.engine = Engine()
        self._firsts = 0
        self._pending = 0
        self._measured_done = 0
        self._measured_sent = 0
        self._finished = 0
        self._failed = 0

    @property
    def clients(self) -> int:
        return round(self.level) if self.kind == "concurrency" else 1

    @property
    def least(self) -> int:
        """Requests that a step measures at least, unless its time is over."""
        return max(20, min(2 * self.clients, self.bounds.requests))

    @property
    def sent_within(self) -> list[Outcome]:
        """Requests of the window, in the order in which they were sent."""
        start, end = self.window
        return [outcome for outcome in self.outcomes if start <= outcome.started < end]

    @property
    def measured(self) -> list[Outcome]:
        """Those of them that are complete."""
        return [outcome for outcome in self.sent_within if outcome.ended is not None]

    def sent(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if len(self.outcomes) >= self.bounds.sent:
            self.end("requests")
        if self._inside(outcome):
            self._pending += 1
            self._measured_sent += 1
            if self._measured_sent >= self.bounds.requests:
                self._close("requests")

    def done(self, outcome: Outcome) -> None:
        self._finished += 1
        self._failed += outcome.error is not None
        if self._too_many_errors():
            self.end("errors")
            return
        if self._inside(outcome):
            self._pending -= 1
            self._measured_done += 1
            if self._measured_done % max(5, self._measured_done // 10) == 0:
                self._judge()
        elif self.window[0] == math.inf and (outcome.first or self.kind == "rate"):
            self._warm(outcome)
        if self.window[1] < math.inf and not self._pending:
            self.stop.set()

    def end(self, why: Ended) -> None:
        """Now, with what there is."""
        self._close(why)
        self.stop.set()

    async def watch(self, client: ProbeClient) -> None:
        """Times, our own load and the engine's metrics, until the stop. Never raises."""
        first = await scrape(client)
        next_scrape, cpu, wall = 0.0, time.process_time(), time.perf_counter()
        while not self.stop.is_set():
            before = time.perf_counter()
            await asyncio.sleep(_TICK)
            now = time.perf_counter()
            self.client.lags.append(now - before - _TICK)
            self._watch_times(now)
            if first is not None and now >= next_scrape:
                next_scrape = now + _SCRAPE_EVERY
                self._take(await scrape(client), first)
        elapsed = time.perf_counter() - wall
        self.client.core_share = (time.process_time() - cpu) / elapsed if elapsed else 0.0
        if first is not None:
            self._take(await scrape(client), first)

    def _watch_times(self, now: float) -> None:
        start, end = self.window
        seconds = self.bounds.seconds
        if now >= self.bounds.deadline:
            self.end("time")
        elif start == math.inf and now - self.began >= seconds / 2:
            self._open(self.began)  # too slow to drop anything
        elif end == math.inf and now - start >= seconds:
            self._close("time")
        elif end < math.inf and (now - end >= seconds or not self._pending):
            self.stop.set()

    def _take(self, now: Counters | None, first: Counters) -> None:
        if now is None:
            return
        engine, since = self.engine, now.since(first)
        engine.kv_usage = _larger(engine.kv_usage, now.kv_usage)
        engine.running = _larger(engine.running, now.running)
        engine.waiting = _larger(engine.waiting, now.waiting)
        engine.preemptions = since.preemptions
        if since.hit_tokens is not None and since.query_tokens:
            engine.hit_share = since.hit_tokens / since.query_tokens

    def _warm(self, outcome: Outcome) -> None:
        now = time.perf_counter()
        self._firsts += 1
        if self.kind == "concurrency":
            if self._firsts >= self.clients:
                self._open(now)
        elif now - self.began >= 2 * ((outcome.ended or now) - outcome.started):
            self._open(now)

    def _open(self, start: float) -> None:
        self.window = (start, math.inf)
        inside = [outcome for outcome in self.outcomes if outcome.started >= start]
        self._measured_sent = len(inside)
        self._measured_done = sum(outcome.ended is not None for outcome in inside)
        self._pending = self._measured_sent - self._measured_done

    def _close(self, why: Ended) -> None:
        if self.window[1] == math.inf:
            now = time.perf_counter()
            start = self.window[0]
            if start == math.inf:  # failures and interruptions within the warm-up count all the same
                start = now if why == "time" else self.began
            self.window = (start, now)
            self.ended = why
        elif why in ("errors", "flooded", "interrupted"):
            self.ended = why

    def _inside(self, outcome: Outcome) -> bool:
        return self.window[0] <= outcome.started < self.window[1]

    def _judge(self) -> None:
        ttfts = [o.result.ttft for o in self.measured if o.result is not None]
        if len(ttfts) >= 5:
            self.precision = median_precision(ttfts)
        if self._measured_done >= self.least and self.precision <= self.bounds.precision:
            self._close("precise")

    def _too_many_errors(self) -> bool:
        """Beyond doubt: of twenty, or of the first five all."""
        if self._finished < 20:
            return self._finished >= 5 and self._failed == self._finished
        return self._failed > ERRORS_ALLOWED * self._finished


def median_precision(values: Sequence[float]) -> float:
    """Half-width of the 95% interval of the median over the median; `values` in order of time.

    From order statistics, with the number of values lowered for what neighbours share: n (1 - r) / (1 + r), r the
    lag-1 autocorrelation of the logarithms (Bayley and Hammersley, 1946).
    """
    n = len(values)
    logs = [math.log(max(value, 1e-9)) for value in values]
    mean = sum(logs) / n
    variance = sum((x - mean) ** 2 for x in logs)
    if not variance:
        return 0.0
    r = sum((a - mean) * (b - mean) for a, b in pairwise(logs)) / variance
    r = min(0.95, max(0.0, r))
    half = 0.98 / math.sqrt(n * (1 - r) / (1 + r))
    low, high = (quantile(values, min(1.0, max(0.0, 0.5 + side * half))) for side in (-1, 1))
    return (high - low) / 2 / max(median(values), 1e-9)


def error_counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """By kind, most frequent first."""
    return dict(Counter(o.error.kind for o in outcomes if o.error is not None).most_common())


def _larger(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else max(a, b)
