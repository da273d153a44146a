"""From times to a verdict, and how sure it is. Pure: no clock, no network.

The statistic is the median over rounds of TTFT(cold) / TTFT(warm), with a bootstrap interval over rounds: both
requests of a round are near in time, so drift cancels. The same against the control request guards against
everything that makes a second request fast without a prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from anaphora.probes.statistics import Interval, median, median_interval, split_modes
from anaphora.probes.verify.trials import Trial, of_kind

Answer = Literal["works", "partly", "does not", "cannot tell"]

CHECK_AFTER = (6, 10, 16, 24, 36, 54, 80)
"""Rounds after which the verdict is looked at; few looks keep the error rate where the level puts it."""

LEVEL = 0.99
SMALLEST_GAIN = 1.1
"""A ratio below this is not worth the name: prefix caching would be of no use here."""

_MODE_GAP = 1.4
"""Ratio by which the slow and the fast warm requests must be apart to count as two kinds."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`ratio` is cold / warm, `control_ratio` control / warm; None with fewer than two whole rounds."""

    answer: Answer
    reason: str
    rounds: int
    ratio: Interval | None = None
    control_ratio: Interval | None = None
    hit_share: float | None = None
    """Share of the warm requests that were as fast as reuse makes them, by the clock alone."""
    threshold: float | None = None
    """Seconds between a hit and a miss, where the clock can tell them apart."""
    basis: Literal["clock", "server"] = "clock"
    """Server: the clock left it open, and cached_tokens and counters agree."""
    more_rounds: int | None = None
    """For "cannot tell": rounds in all after which it could be told; None where no number would do."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds to the first token of the three requests."""

    cold: float
    warm: float
    control: float


def whole_rounds(trials: Sequence[Trial]) -> list[Round]:
    """Rounds whose three requests were all measured, in order."""
    times = {(trial.kind, trial.round): max(trial.ttft, 1e-9) for trial in trials}
    numbers = sorted({trial.round for trial in trials})
    return [
        Round(times["cold", n], times["warm", n], times["control", n])
        for n in numbers
        if {("cold", n), ("warm", n), ("control", n)} <= times.keys()
    ]


def judge(rounds: Sequence[Round], *, seed: int = 0) -> Verdict:
    """The verdict on what was measured so far."""
    count = len(rounds)
    if count < CHECK_AFTER[0]:
        return Verdict("cannot tell", f"{count} rounds are too few.", count, more_rounds=CHECK_AFTER[0])
    ratio = median_interval([r.cold / r.warm for r in rounds], seed=seed, level=LEVEL)
    control = median_interval([r.control / r.warm for r in rounds], seed=seed, level=LEVEL)
    threshold = hit_threshold(rounds)
    fast = None if threshold is None else sum(r.warm < threshold for r in rounds)
    measured = (count, ratio, control, None if fast is None else fast / count, threshold)
    if fast is not None and 2 <= fast <= count - 2 and 0.1 < fast / count < 0.9:
        seen = f"{fast} of {count} warm requests were fast, the others as slow as cold ones."
        return Verdict("partly", seen, *measured)
    if ratio.low > SMALLEST_GAIN and control.low > SMALLEST_GAIN:
        return Verdict(
            "works", f"The first token of a known prefix comes {ratio.estimate:.2g} times sooner.", *measured
        )
    if ratio.high < SMALLEST_GAIN:
        return Verdict("does not", "A known prefix is no faster than a new one.", *measured)
    if ratio.low > SMALLEST_GAIN:
        reason = "Warm requests are faster than cold ones, but so are control requests, which share no prefix."
        return Verdict("cannot tell", reason, *measured)
    reason = f"The ratio lies between {ratio.low:.2f} and {ratio.high:.2f}: too wide around {SMALLEST_GAIN}."
    return Verdict("cannot tell", reason, *measured, more_rounds=rounds_needed(ratio, count))


def hit_threshold(rounds: Sequence[Round]) -> float | None:
    """Seconds that part fast warm requests from slow ones; None where there is no group of fast ones.

    New prompts must be slow by that measure, nearly all of them: else it parts noise, not hits from misses.
    """
    cold = median([r.cold for r in rounds])
    warm = [r.warm for r in rounds]
    modes = split_modes(warm, smallest=2)
    if (
        modes is not None
        and modes.gap > _MODE_GAP
        and median(modes.low) * _MODE_GAP < cold
        and 1 / _MODE_GAP < median(modes.high) / cold < _MODE_GAP
    ):
        threshold = modes.threshold
    elif median(warm) * _MODE_GAP < cold:
        threshold = math.sqrt(median(warm) * cold)
    else:
        return None
    new = [seconds for r in rounds for seconds in (r.cold, r.control)]
    return threshold if sum(seconds < threshold for seconds in new) <= 0.05 * len(new) else None


def rounds_needed(interval: Interval, rounds: int) -> int | None:
    """Rounds in all until the interval, which narrows with their square root, leaves SMALLEST_GAIN on one side."""
    distance = abs(interval.estimate - SMALLEST_GAIN)
    half = (interval.high - interval.low) / 2
    if distance < 0.01:
        return None
    needed = math.ceil(rounds * (half / distance) ** 2 * 1.2)
    return max(needed, rounds + 2) if needed <= 1000 else None


def medians(trials: Sequence[Trial]) -> dict[str, float]:
    """Median TTFT by kind, of the kinds that were measured."""
    found = {kind: [t.ttft for t in of_kind(trials, kind)] for kind in ("cold", "warm", "control")}
    return {kind: median(values) for kind, values in found.items() if values}
