"""What policies by hazard remember: blocks used together, when they were, and what became of them."""

from __future__ import annotations

from collections import deque
from math import sqrt

from anaphora.blocks.eviction.return_model import ReturnModel, class_of

MEMORY = 8
"""Returns are counted, and names of evicted blocks kept, for as many ticks as MEMORY times the cached blocks."""
RIPE = 4
"""Nothing is learned before that many times the cached blocks were touched: LRU's order until then."""
HALF_LIFE = 64
"""What was learned counts half after as many ticks as HALF_LIFE times the cached blocks: habits change."""
_STEPS = 8
"""In which it does."""
SURPRISE = 3.0
"""Habits have changed at once when so many standard deviations fewer blocks came back than was foreseen."""
_KEPT = 0.1
"""Share of what was learned before that counts on, at least."""
SHORTEST = 1024
"""Ticks between two lessons, at least; half as many as there are cached blocks where these are more."""


class Cohort:
    """Runs of one class that began between two lessons: how many of their blocks were not used again."""

    __slots__ = ("born", "kind", "waiting")

    def __init__(self, born: int, kind: int) -> None:
        self.born = born
        """The middle of the time from the first of them to the lesson after it."""
        self.kind = kind
        self.waiting = 0


class Run:
    """Blocks used together: when, and in which class."""

    __slots__ = ("born", "cohort", "gap", "kind", "turn")

    def __init__(self, born: int, kind: int, turn: int, gap: float, cohort: Cohort) -> None:
        self.born = born
        self.kind = kind
        self.turn = turn
        """Uses so far, of the prefix it continues."""
        self.gap = gap
        """Log2 of the ticks between uses, averaged with more weight on the last."""
        self.cohort = cohort


class History:
    """Runs by cohort, and the model that learns from them, lesson by lesson. Times are in ticks."""

    def __init__(self) -> None:
        self.model = ReturnModel()
        self.next_lesson = 512
        """When `lesson` is due."""
        self._last_lesson = self._next_fading = 0
        self._log: deque[Cohort] = deque()
        self._latest: dict[int, Cohort] = {}
        """Those since the last lesson, by class."""
        self._foreseen = 0.0
        """Blocks that should come back until the next lesson, of those that were waiting at the last one."""
        self._came_back = 0
        """Those that did."""
        self._blocks = self._squares = 0
        """Sums over all runs that came back, of their blocks and the squares of these."""

    def __len__(self) -> int:
        """Cohorts that are remembered."""
        return len(self._log)

    def start(self, now: int, turn: int, gap: float) -> Run:
        """A new run; its blocks are to be counted in `cohort.waiting`."""
        kind = class_of(turn, gap)
        cohort = self._latest.get(kind)
        if cohort is None:
            cohort = self._latest[kind] = Cohort((now + self.next_lesson) // 2, kind)
            self._log.append(cohort)
        return Run(now, kind, turn, gap, cohort)

    def returned(self, run: Run, blocks: int, becomes: Run, now: int) -> None:
        """So many blocks of a run were used again, and belong to another one from now on."""
        self.model.returned(run.kind, now - run.born, blocks)
        self._blocks += blocks
        self._squares += blocks * blocks
        if run.born < self._last_lesson:
            self._came_back += blocks
        run.cohort.waiting -= blocks
        becomes.cohort.waiting += blocks

    def lesson(self, now: int, num_cached: int) -> int:
        """Learn from what happened; returns the tick from which on runs are remembered."""
        size = max(1, num_cached)
        oldest = now - MEMORY * size
        while self._log and self._log[0].born < oldest:
            gone = self._log.popleft()
            self.model.stayed_away(gone.kind, gone.waiting)
        ticks = min(now, max(SHORTEST, size // 2))
        if now >= RIPE * size:
            self._forget_what_was_wrong()
            waiting = [(cohort.kind, now - cohort.born, cohort.waiting) for cohort in self._log]
            self.model.learn(waiting, MEMORY * size)
            self._foreseen = self.model.foresee(waiting, ticks)
            if now >= self._next_fading:
                self.model.fade(0.5 ** (1 / _STEPS))
                self._next_fading = now + HALF_LIFE * size // _STEPS
        self._last_lesson, self.next_lesson = now, now + ticks
        self._latest, self._came_back = {}, 0
        return oldest

    def _forget_what_was_wrong(self) -> None:
        """After a surprise. Blocks come back run by run: a compound Poisson process, whose variance is this."""
        variance = self._foreseen * self._squares / max(1, self._blocks)
        if self._foreseen - self._came_back > SURPRISE * sqrt(variance):
            self.model.fade(max(_KEPT, self._came_back / self._foreseen))
