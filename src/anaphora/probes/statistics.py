"""Small statistics in plain Python: quantiles, and bootstrap intervals that are the same for the same seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its confidence interval."""

    estimate: float
    low: float
    high: float
    level: float
    """Confidence, for example 0.95."""

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def quantile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between order statistics (the usual default, type 7 of Hyndman and Fan, 1996).

    Raises ValueError for no values.
    """
    if not values:
        raise ValueError("no values to take a quantile of")
    ordered = sorted(values)
    position = (len(ordered) - 1) * q
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def mad(values: Sequence[float]) -> float:
    """Median absolute deviation times 1.4826: the standard deviation where the noise is normal, robust where not."""
    middle = median(values)
    return 1.4826 * median([abs(value - middle) for value in values])


def bootstrap(
    groups: Sequence[Sequence[float]],
    statistic: Callable[..., float],
    *,
    seed: int,
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> Interval:
    """Percentile bootstrap of statistic(*groups); the groups are resampled independently (Efron, 1979)."""
    rng = random.Random(seed)
    found = sorted(
        statistic(*(rng.choices(group, k=len(group)) for group in groups))
        for _ in range(resamples)
    )  # fmt: skip
    tail = (1 - level) / 2
    return Interval(statistic(*groups), quantile(found, tail), quantile(found, 1 - tail), level)


def median_interval(values: Sequence[float], *, seed: int, level: float = 0.95) -> Interval:
    """Bootstrap interval of the median."""
    return bootstrap([values], median, seed=seed, level=level)


@dataclass(frozen=True, slots=True)
class TwoModes:
    """A split of values into a low and a high group."""

    threshold: float
    low: tuple[float, ...]
    high: tuple[float, ...]
    gap: float
    """Ratio of the smallest high value to the largest low one."""


def split_modes(values: Sequence[float], smallest: int = 1) -> TwoModes | None:
    """The split at the widest gap of the logarithms that leaves `smallest` or more values on both sides.

    None where there is no such gap, or the values around it are equal.
    """
    ordered = sorted(value for value in values if value > 0)
    inner = range(smallest - 1, len(ordered) - smallest)
    gaps = [(above / below, i) for i, (below, above) in enumerate(pairwise(ordered)) if i in inner]
    if not gaps:
        return None
    gap, at = max(gaps)
    if gap <= 1:
        return None
    threshold = math.sqrt(ordered[at] * ordered[at + 1])
    return TwoModes(threshold, tuple(ordered[: at + 1]), tuple(ordered[at + 1 :]), gap)
