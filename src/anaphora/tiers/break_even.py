"""Fetch or recompute: how long a tier takes, learnt as it runs, and how much of a prefix is worth loading.

A load of b bytes takes latency + b / bandwidth seconds. Both are fitted by least squares over the loads seen, each
counting less as time passes; what is expected before the first load counts like a few loads that never age. So a
tier that was slow an hour ago is tried again, without a timer or a dice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

_HALF_LIFE_SECONDS = 30.0
_PRIOR_WEIGHT = 0.5
_PRIOR_BYTES = (1 << 18, 1 << 26)
"""Sizes of the loads that stand for the expectation."""


@dataclass(frozen=True, slots=True)
class LoadSpeed:
    """What a tier is expected to do: seconds(b) = latency + b / bandwidth."""

    latency: float
    """Seconds."""
    bandwidth: float
    """Bytes per second."""

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth


class SpeedEstimate:
    """The speed of one tier, from what was observed. Thread-safe."""

    def __init__(self, expected: LoadSpeed, clock: Callable[[], float] = time.monotonic) -> None:
        self._expected = expected
        self._clock = clock
        self._lock = Lock()
        self._seen_at = clock()
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def observe(self, nbytes: int, seconds: float) -> None:
        """One load of `nbytes` took this long, from being asked for to its last byte."""
        with self._lock:
            now = self._clock()
            keep = self._faded(now)
            self._sums = tuple(  # type: ignore[assignment]
                keep * old + new for old, new in zip(self._sums, _terms(nbytes, seconds), strict=True)
            )
            self._seen_at = now

    def speed(self) -> LoadSpeed:
        """The best guess now."""
        with self._lock:
            keep = self._faded(self._clock())
            count, size, square, secs, product = (keep * old for old in self._sums)
        for nbytes in _PRIOR_BYTES:
            terms = _terms(nbytes, self._expected.seconds(nbytes))
            count += _PRIOR_WEIGHT * terms[0]
            size += _PRIOR_WEIGHT * terms[1]
            square += _PRIOR_WEIGHT * terms[2]
            secs += _PRIOR_WEIGHT * terms[3]
            product += _PRIOR_WEIGHT * terms[4]
        slope = (count * product - size * secs) / (count * square - size * size)
        latency = (secs - slope * size) / count
        if slope <= 0:  # all of it is latency, as far as one can see
            return LoadSpeed(secs / count, float(_PRIOR_BYTES[1]) * count / secs)
        if latency < 0:
            return LoadSpeed(0.0, square / product)
        return LoadSpeed(latency, 1 / slope)

    def _faded(self, now: float) -> float:
        return float(0.5 ** (max(0.0, now - self._seen_at) / _HALF_LIFE_SECONDS))


def _terms(nbytes: float, seconds: float) -> tuple[float, float, float, float, float]:
    """What the normal equations need of one observation, which counts by 1 / bytes**2: relative errors are fitted."""
    weight = 1 / max(nbytes, 1.0) ** 2
    return weight, weight * nbytes, weight * nbytes * nbytes, weight * seconds, weight * nbytes * seconds


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """Computing the tokens a .. b of a prompt takes per_token * (b - a) + per_pair * (b**2 - a**2) / 2 seconds."""

    per_token: float
    """Seconds; the layers' matrices."""
    per_pair: float = 0.0
    """Seconds a token spends on each token before it; attention."""

    def seconds(self, start: int, stop: int) -> float:
        return self.per_token * (stop - start) + self.per_pair * (stop * stop - start * start) / 2


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring blocks of a prefix that lie in one tier."""

    tier: int
    blocks: int
    tokens: int
    nbytes: int


def blocks_to_load(
    runs: Sequence[Run], start: int, stop: int, speeds: Sequence[LoadSpeed], prefill: PrefillSpeed
) -> tuple[int, float]:
    """How many blocks of `runs`, from the first, to load so that tokens start .. stop are there soonest.

    `start`: tokens that are in the pool already; `speeds[tier]`. Returns (blocks, seconds saved against computing
    all); (0, 0.0) when nothing is worth it. Tiers work side by side, so loads of several take as long as the
    slowest; what is not loaded is computed after them. A byte costs the same everywhere and a token more the later
    it stands, so within a run the best is one of its ends, or where its tier begins to be the slowest.
    """
    all_computed = best_seconds = prefill.seconds(start, stop)
    best = blocks = 0
    position = start
    loaded: dict[int, int] = {}
    for run in runs:
        before = loaded.get(run.tier, 0)
        others = max((speeds[tier].seconds(size) for tier, size in loaded.items() if tier != run.tier), default=0.0)
        for count in _candidates(run, before, others, speeds[run.tier]):
            loading = max(others, speeds[run.tier].seconds(before + run.nbytes * count // run.blocks))
            computed_from = min(position + run.tokens * count // run.blocks, stop)
            seconds = loading + prefill.seconds(computed_from, stop)
            if seconds < best_seconds:
                best, best_seconds = blocks + count, seconds
        loaded[run.tier] = before + run.nbytes
        blocks += run.blocks
        position += run.tokens
    return best, all_computed - best_seconds


def _candidates(run: Run, before: int, others: float, speed: LoadSpeed) -> set[int]:
    """Counts of the run's blocks among which the best one is."""
    hidden = ((others - speed.latency) * speed.bandwidth - before) * run.blocks / run.nbytes
    return {min(max(count, 1), run.blocks) for count in (int(hidden), int(hidden) + 1, run.blocks)}
