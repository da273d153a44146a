"""When blocks come back, by class and age, learned from those that did and those that did not.

Ages, in ticks, fall into buckets two an octave. A class's hazard in a bucket is the share of its blocks that reached
it and came back in it (a life table, Kaplan and Meier 1958: a block still away counts as far as it has come). Where a
class has been seen little its hazard leans on all classes of the same turn, and these on all classes.

The index of a block in bucket a is the best it can be worth, were it kept until some bucket e >= a:

    index(a) = max over e of  P(comes back in a..e | away until a)  /  E[ticks until it is back, or e ends]

From one lesson to the next the hazards also say how many of those waiting should come back. When far fewer do, the
traffic has changed, and what was learned before it is forgotten as far as it was wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

TURNS = (0, 0, 1, 2, 3, 3, 4, 4, 4, 4)
"""Turn -> class; beyond the last: one more."""
_NUM_TURNS = TURNS[-1] + 2
_GAPS = 12
"""Classes of the gap: two octaves each."""
NUM_CLASSES = _NUM_TURNS * _GAPS
BUCKETS = 56
_FINE = 4
"""Ages below 2 ** _FINE share the first bucket."""
_LEAN = 400.0
"""Blocks that a class must have seen to count as much as what it leans on."""
_PRIOR = 0.02
"""Hazard of every bucket before anything was seen: it falls with age as 1 / age, and gives the order of LRU."""
_PRIOR_BLOCKS = 50.0
_EDGES = [0.0, *(2.0 ** (_FINE + i // 2) * (1.5 if i % 2 else 1.0) for i in range(BUCKETS))]
_WIDTHS = [high - low for low, high in pairwise(_EDGES)]
Counts = list[float]
Waiting = tuple[int, int, int]
"""(class, age, blocks)."""


def bucket_of(age: int) -> int:
    """Two an octave, from the bits alone: 2**n .. 1.5 * 2**n - 1 and the rest up to 2**(n+1)."""
    bits = age.bit_length()
    if bits <= _FINE:
        return 0
    bucket = 2 * (bits - _FINE) - 1 + (age >> (bits - 2) & 1)
    return bucket if bucket < BUCKETS else BUCKETS - 1


def class_of(turn: int, gap: float) -> int:
    """`gap`: log2 of ticks, of no meaning at the first turn."""
    row = TURNS[turn] if turn < len(TURNS) else _NUM_TURNS - 1
    return row * _GAPS + (min(_GAPS - 1, int(gap / 2)) if turn > 1 else 0)


class _Table(NamedTuple):
    """What was seen of a class, or of several together: blocks, by bucket of their age."""

    away: float
    """That did not come back, for as long as anyone counted."""
    returned: Counts
    waiting: Counts

    def hazard(self, prior: Counts, weight: float) -> Counts:
        """By bucket, leaning on `prior` as on `weight` blocks."""
        found = []
        at_risk = self.away + weight
        for back, still, lean in zip(
            reversed(self.returned),
            reversed(self.waiting),
            reversed(prior),
            strict=True,
        ):
            at_risk += back + still
            found.append((back + weight * lean) / (at_risk - still / 2))
        found.reverse()
        return found


class ReturnModel:
    """`index[class][bucket]`: expected hits per block and tick. Rebuilt by `learn`."""

    def __init__(self) -> None:
        self._returned: dict[int, Counts] = defaultdict(lambda: [0.0] * BUCKETS)
        self._away: dict[int, float] = defaultdict(float)
        self._unseen = index_of([_PRIOR] * BUCKETS)
        self.index = [self._unseen] * NUM_CLASSES
        self._hazards = [[_PRIOR] * BUCKETS] * NUM_CLASSES

    def returned(self, kind: int, age: int, blocks: int) -> None:
        """So many blocks came back at that age."""
        self._returned[kind][bucket_of(age)] += blocks

    def stayed_away(self, kind: int, blocks: int) -> None:
        """So many blocks did not, for as long as anyone counted."""
        self._away[kind] += blocks

    def fade(self, factor: float) -> None:
        """What was seen so far counts `factor` of what it did."""
        for kind, counts in self._returned.items():
            self._returned[kind] = [count * factor for count in counts]
        for kind in self._away:
            self._away[kind] *= factor

    def learn(self, waiting: Iterable[Waiting], oldest: int) -> None:
        """Rebuild the index. `waiting`: those that may still come back, up to age `oldest`.

        Beyond that age nothing was seen: there the prior alone decides. O(waiting + classes seen x buckets).
        """
        reach = min(BUCKETS, bucket_of(oldest) + 2)
        still: dict[int, Counts] = defaultdict(lambda: [0.0] * reach)
        for kind, age, blocks in waiting:
            still[kind][min(reach - 1, bucket_of(age))] += blocks
        seen = {
            kind: _Table(self._away.get(kind, 0.0), self._returned[kind][:reach], still[kind])
            for kind in sorted(self._returned.keys() | self._away.keys() | still.keys())
        }
        beyond = self._unseen[reach:]
        overall = _together(seen.values(), reach).hazard([_PRIOR] * reach, _PRIOR_BLOCKS)
        for row in range(_NUM_TURNS):
            kinds = range(row * _GAPS, (row + 1) * _GAPS)
            members = [kind for kind in kinds if kind in seen]
            of_turn = _together([seen[kind] for kind in members], reach).hazard(overall, _LEAN)
            self._hazards[kinds.start : kinds.stop] = [of_turn] * _GAPS
            self.index[kinds.start : kinds.stop] = [index_of(of_turn) + beyond] * _GAPS
            if row:  # at the first turn there is one class
                for kind in members:
                    self._hazards[kind] = hazard = seen[kind].hazard(of_turn, _LEAN)
                    self.index[kind] = index_of(hazard) + beyond

    def foresee(self, waiting: Iterable[Waiting], ticks: int) -> float:
        """How many of those blocks should come back within so many ticks."""
        total = 0.0
        for kind, age, blocks in waiting:
            hazard, bucket, away = self._hazards[kind], bucket_of(age), 1.0
            start, stop = float(age), age + ticks
            while start < stop and bucket < len(hazard):
                end = min(stop, _EDGES[bucket + 1])
                away *= 1 - hazard[bucket] * (end - start) / _WIDTHS[bucket]
                start, bucket = end, bucket + 1
            total += blocks * (1 - away)
        return total


def _together(tables: Iterable[_Table], reach: int) -> _Table:
    away, returned, waiting = 0.0, [0.0] * reach, [0.0] * reach
    for table in tables:
        away += table.away
        returned = [a + b for a, b in zip(returned, table.returned, strict=True)]
        waiting = [a + b for a, b in zip(waiting, table.waiting, strict=True)]
    return _Table(away, returned, waiting)


def index_of(hazard: Sequence[float]) -> Counts:
    """The best slope from each bucket's start to any later point of the curve (ticks held, blocks back).

    Both grow alike from what is still away, so the condition on `away until a` cancels out; the best slopes are
    those of the upper hull, built from the right. O(buckets).
    """
    away, ticks, back = 1.0, 0.0, 0.0
    curve = [(0.0, 0.0)]
    for rate, width in zip(hazard, _WIDTHS, strict=False):
        now = away * rate
        ticks += (away - now / 2) * width
        back += now
        away -= now
        curve.append((ticks, back))
    hull = [curve.pop()]
    index = []
    for ticks, back in reversed(curve):
        slope = _slope(ticks, back, hull[-1])
        while len(hull) > 1 and (further := _slope(ticks, back, hull[-2])) >= slope:
            hull.pop()
            slope = further
        hull.append((ticks, back))
        index.append(slope)
    index.reverse()
    return index


def _slope(ticks: float, back: float, later: tuple[float, float]) -> float:
    return (later[1] - back) / max(later[0] - ticks, 1e-9)
