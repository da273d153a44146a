"""When blocks come back, by class and age, learned from those that did and those that did not.

Ages, in ticks, fall into buckets two an octave. A class's hazard in a bucket is the share of its blocks that reached
it and came back in it (a life table, Kaplan and Meier 1958: a block still away counts as far as it has come). Where a
class has been seen little its hazard leans on all classes of the same turn, and these on all classes.

The index of a block in bucket a is the best it can be worth, were it kept until some bucket e >= a:

    index(a) = max over e of  P(comes back in a..e | away until a)  /  E[ticks until it is back, or e ends]
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

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


class ReturnModel:
    """`index[class][bucket]`: expected hits per block and tick. Rebuilt by `learn`."""

    def __init__(self) -> None:
        self._returned: list[Counts] = [[0.0] * BUCKETS for _ in range(NUM_CLASSES)]
        self._away = [0.0] * NUM_CLASSES
        base = _index([_PRIOR] * BUCKETS)
        self.index = [base] * NUM_CLASSES

    def returned(self, kind: int, age: int, blocks: int) -> None:
        """So many blocks came back at that age."""
        self._returned[kind][bucket_of(age)] += blocks

    def stayed_away(self, kind: int, blocks: int) -> None:
        """So many blocks did not, for as long as anyone counted."""
        self._away[kind] += blocks

    def age(self, factor: float) -> None:
        """What was seen so far counts `factor` of what it did."""
        self._returned = [[count * factor for count in counts] for counts in self._returned]
        self._away = [count * factor for count in self._away]

    def learn(self, waiting: Iterable[tuple[int, int, int]]) -> None:
        """Rebuild the index. `waiting`: (class, age, blocks) of those that may still come back. O(waiting)."""
        still: list[Counts] = [[0.0] * BUCKETS for _ in range(NUM_CLASSES)]
        for kind, age, blocks in waiting:
            still[kind][bucket_of(age)] += blocks
        classes = range(NUM_CLASSES)
        overall = self._hazard(classes, still, [_PRIOR] * BUCKETS, _PRIOR_BLOCKS)
        for row in range(_NUM_TURNS):
            members = range(row * _GAPS, (row + 1) * _GAPS)
            of_turn = self._hazard(members, still, overall, _LEAN)
            index = _index(of_turn)
            for kind in members:
                seen = self._away[kind] or any(self._returned[kind]) or any(still[kind])
                self.index[kind] = _index(self._hazard([kind], still, of_turn, _LEAN)) if seen and row else index

    def _hazard(self, kinds: Iterable[int], still: list[Counts], prior: Counts, weight: float) -> Counts:
        kinds = list(kinds)
        at_risk = sum(self._away[kind] for kind in kinds)
        hazard = [0.0] * BUCKETS
        returned = [sum(column) for column in zip(*(self._returned[kind] for kind in kinds), strict=True)]
        waiting = [sum(column) for column in zip(*(still[kind] for kind in kinds), strict=True)]
        for bucket in range(BUCKETS - 1, -1, -1):
            at_risk += returned[bucket] + waiting[bucket]
            seen = at_risk - waiting[bucket] / 2
            hazard[bucket] = (returned[bucket] + weight * prior[bucket]) / (seen + weight)
        return hazard


def _index(hazard: Counts) -> Counts:
    """The best slope from each bucket's start to any later point of the curve (ticks held, blocks back).

    Both grow alike from what is still away, so the condition on `away until a` cancels out; the best slopes are
    those of the upper hull, built from the right. O(buckets).
    """
    away, ticks, back = 1.0, 0.0, 0.0
    curve = [(0.0, 0.0)]
    for rate, width in zip(hazard, _WIDTHS, strict=True):
        now = away * rate
        ticks += (away - now / 2) * width
        back += now
        away -= now
        curve.append((ticks, back))
    index = [0.0] * BUCKETS
    hull = [curve[-1]]
    for start in range(BUCKETS - 1, -1, -1):
        ticks, back = curve[start]
        slope = _slope(ticks, back, hull[-1])
        while len(hull) > 1 and (further := _slope(ticks, back, hull[-2])) >= slope:
            hull.pop()
            slope = further
        hull.append((ticks, back))
        index[start] = slope
    return index


def _slope(ticks: float, back: float, later: tuple[float, float]) -> float:
    return (later[1] - back) / max(later[0] - ticks, 1e-9)
