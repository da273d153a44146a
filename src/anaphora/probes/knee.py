"""Where TTFT turns steep: a segmented fit over the load, and a bootstrap that says how sure that is.

    TTFT(x) = base + slope * x + steep * max(0, x - knee)

A closed loop on an engine with B places waits (x - B) / B service times beyond B, and a queue that is overfed waits in
proportion to what is too much: both are straight lines in the load itself, so that is the scale of the fit. Errors are
relative (the logarithm of the median), weighted with how well each step's median is known. Segmented regression:
Hudson (1966), Muggeo (2003); blocks of the bootstrap, because neighbouring requests share their queue: Kuensch (1989).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from typing import Literal

from anaphora.probes.statistics import median, quantile

RESAMPLES = 200
PARTS = 6
"""Places for a knee that are tried between two steps."""
MISFIT = 0.05
"""Relative error that the straight lines are allowed on top of the noise."""
LEAST_GAIN = 12.0
"""Drop of chi-squared that two more parameters must bring; 9.2 would come by chance once in a hundred."""
LEAST_RISE = 1.5
"""TTFT at the highest load over that at the knee; less is no knee anybody would notice."""

_CHOICES = ((0, 1, 2), (0, 2), (0, 1), (1, 2), (0,), (1,), (2,))
"""Columns of the fit: base, slope, steep."""

Sureness = Literal["certain", "likely", "guess"]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step of the sweep: its load and the TTFTs in the order in which the requests were sent (seconds)."""

    load: float
    ttfts: Sequence[float]


@dataclass(frozen=True, slots=True)
class Knee:
    """`load` is the estimate; in 90% of the resampled sweeps it lay between `low` and `high`."""

    load: float
    low: float
    high: float
    step: float
    """The highest measured load that is not past the knee."""
    shares: dict[float, float]
    """Measured load -> share of the resampled sweeps that put the knee between it and the next."""
    missing: float
    """Share of the resampled sweeps without a knee."""
    rise: float
    """TTFT at the highest load over TTFT at the knee."""
    sure: Sureness


@dataclass(frozen=True, slots=True)
class _Fit:
    knee: float
    chi2: float
    rise: float


def find_knee(steps: Sequence[StepTimes], *, seed: int = 0, resamples: int = RESAMPLES) -> Knee | None:
    """The knee, or None where TTFT never turns steep. Needs four steps, three requests in each; fewer are None."""
    steps = sorted((step for step in steps if len(step.ttfts) >= 3), key=lambda step: step.load)
    if len(steps) < 4:
        return None
    xs = [step.load for step in steps]
    rng = random.Random(seed)
    whole = [median(step.ttfts) for step in steps]
    resampled = [[median(_resampled(step.ttfts, rng)) for step in steps] for _ in range(resamples)]
    variances = [_variance([math.log(row[i]) for row in resampled]) + MISFIT**2 for i in range(len(xs))]
    candidates = [_Lines(xs, whole, variances, knee) for knee in (*_places(xs), xs[-1])]
    best = _best(candidates, whole)
    if best is None:
        return None
    found = [fit.knee for row in resampled if (fit := _best(candidates, row)) is not None]
    at = Counter(_step(xs, knee) for knee in found)
    shares = {x: at[x] / resamples for x in xs if at[x]}
    step = _step(xs, best.knee)
    low, high = (quantile(found, q) for q in (0.05, 0.95)) if found else (best.knee, best.knee)
    return Knee(
        best.knee,
        min(low, best.knee),
        max(high, best.knee),
        step,
        shares,
        1 - len(found) / resamples,
        best.rise,
        _sureness(xs, shares, step),
    )


def _sureness(xs: Sequence[float], shares: dict[float, float], step: float) -> Sureness:
    """Certain: 95% of the resampled sweeps agree to within one step; likely: 70%."""
    at = xs.index(step)
    near = sum(shares.get(x, 0.0) for x in xs[max(0, at - 1) : at + 2])
    return "certain" if near >= 0.95 else "likely" if near >= 0.7 else "guess"


def _step(xs: Sequence[float], knee: float) -> float:
    return max((x for x in xs if x <= knee * (1 + 1e-9)), default=xs[0])


def _best(candidates: Sequence[_Lines], ys: Sequence[float]) -> _Fit | None:
    """The best fit with a knee, where it beats the straight line (the last candidate) by enough."""
    fits = [lines.fit(ys) for lines in candidates]
    best = min(fits[:-1], key=lambda fit: fit.chi2)
    return best if fits[-1].chi2 - best.chi2 >= LEAST_GAIN and best.rise >= LEAST_RISE else None


def _places(xs: Sequence[float]) -> list[float]:
    """Every step but the last, and PARTS - 1 places between each and the next."""
    return [
        low * (high / low) ** (i / PARTS) if low > 0 else low + (high - low) * i / PARTS
        for low, high in pairwise(xs)
        for i in range(PARTS)
    ]


class _Lines:
    """The least-squares fit for one place of the knee; at the last step there is nothing past it: a straight line.

    Weights stay those of the whole sample, so a fit is one product of a matrix with the medians, made beforehand for
    each choice of columns: no coefficient may be below zero, and then the best of the choices without it counts.
    """

    def __init__(self, xs: Sequence[float], ys: Sequence[float], variances: Sequence[float], knee: float) -> None:
        self.knee = knee
        self._variances = variances
        self._rows = [(1.0, x, max(0.0, x - knee)) for x in xs]
        self._weights = [1 / (variance * y * y) for variance, y in zip(variances, ys, strict=True)]
        self._operators = [(used, made) for used in _CHOICES if (made := self._operator(used)) is not None]

    def _operator(self, used: tuple[int, ...]) -> list[list[float]] | None:
        """Row i times the medians is coefficient used[i]; None where the columns cannot be told apart."""
        weighted = [[w * row[i] for w, row in zip(self._weights, self._rows, strict=True)] for i in used]
        matrix = [[sum(v * row[j] for v, row in zip(one, self._rows, strict=True)) for j in used] for one in weighted]
        columns = [_solve(matrix, [one[n] for one in weighted]) for n in range(len(self._rows))]
        solved = [column for column in columns if column is not None]
        return [list(values) for values in zip(*solved, strict=True)] if len(solved) == len(columns) else None

    def fit(self, ys: Sequence[float]) -> _Fit:
        best: _Fit | None = None
        for used, operator in self._operators:
            values = [sum(map(mul, row, ys)) for row in operator]
            if min(values) < 0:
                continue
            fit = self._judged(ys, dict(zip(used, values, strict=True)))
            if len(used) == len(self._operators[0][0]):
                return fit  # the unconstrained optimum
            if best is None or fit.chi2 < best.chi2:
                best = fit
        return best or _Fit(self.knee, math.inf, 1.0)

    def _judged(self, ys: Sequence[float], coefficients: dict[int, float]) -> _Fit:
        base, slope, steep = (coefficients.get(i, 0.0) for i in range(3))
        expected = [max(base + slope * x + steep * beyond, 1e-9) for _, x, beyond in self._rows]
        chi2 = sum(math.log(y / e) ** 2 / v for y, e, v in zip(ys, expected, self._variances, strict=True))
        return _Fit(self.knee, chi2, expected[-1] / max(base + slope * self.knee, 1e-9))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Cramer's rule for one to three unknowns; None where they cannot be told apart."""
    n = len(right)
    whole = _determinant(matrix)
    scale = math.prod(matrix[i][i] for i in range(n))
    if abs(whole) <= 1e-12 * scale:
        return None
    return [
        _determinant([[right[i] if j == k else matrix[i][j] for j in range(n)] for i in range(n)]) / whole
        for k in range(n)
    ]


def _determinant(m: list[list[float]]) -> float:
    if len(m) == 1:
        return m[0][0]
    if len(m) == 2:
        return m[0][0] * m[1][1] - m[0][1] * m[1][0]
    return (
        m[0][0] * (m[1][1] * m[2][2] - m[1][2] * m[2][1])
        - m[0][1] * (m[1][0] * m[2][2] - m[1][2] * m[2][0])
        + m[0][2] * (m[1][0] * m[2][1] - m[1][1] * m[2][0])
    )


def _resampled(values: Sequence[float], rng: random.Random) -> list[float]:
    """A moving-block resample; blocks of about the square root of the length."""
    n = len(values)
    size = max(1, math.isqrt(n))
    found: list[float] = []
    while len(found) < n:
        start = rng.randrange(n - size + 1)
        found += values[start : start + size]
    return found[:n]


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)
