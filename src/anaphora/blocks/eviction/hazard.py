"""Our own: keep what promises the most hits for the room and the time it will take until then.

Conversations come back after a think time, one-shot prompts never do; scans never do, loops do on time. How likely
a prefix returns depends on how often it has come back and after how long, and on its age, not monotonically: right
after an answer nobody returns. All three are learned online (return_model.py), in logical time, one tick per block
touched, so the same trace gives the same decisions everywhere.

Blocks used together are one `Run`: they share class and age, so learning and choosing cost per run and not per
block. Evicted blocks leave their run's name behind, for as long as returns are counted: a conversation whose
blocks are gone is known when it comes back. The victims are the worst of a sample of leaves, each with its
ancestors of the same run, while they are leaves.

Related: LHD (Beckmann, Chen, Cidon, NSDI 2018) ranks by hits per space and time, with sampled candidates; the
index is Gittins' (1979). Chains, runs, classes by turn and gap, and names of runs are ours.
"""

from __future__ import annotations

from math import log2
from random import Random
from typing import TypeVar

from anaphora.blocks.eviction.base import EvictionPolicy, PrefixEntry
from anaphora.blocks.eviction.return_model import bucket_of, class_of
from anaphora.blocks.eviction.runs import History, Run
from anaphora.types import BlockHash

P = TypeVar("P", bound=PrefixEntry)

SAMPLE = 64
"""Leaves looked at anew ..."""
VICTIMS = 4
"""... for so many victims; fewer where there are few leaves."""
SPARE = 16
"""The next worst ones of the last sample, looked at again."""
FORKS = 3
"""Children a block may get later before what follows it counts as another conversation (a system prompt has
thousands)."""


class Hazard(EvictionPolicy[P]):
    """Lowest expected hits per block and tick goes first."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed).random
        self._runs: dict[P, Run] = {}
        """Of every cached entry."""
        self._forks: dict[P, int] = {}
        """Children that were not inserted right after their parent, ever."""
        self._candidates: list[P] = []
        self._places: dict[P, int] = {}
        """Indices in the list of candidates."""
        self._doomed: list[tuple[P, Run]] = []
        """The next victims, the worst last; void when used since."""
        self._spare: list[P] = []
        self._names: dict[BlockHash, Run] = {}
        """Of evicted blocks, the first evicted first."""
        self._history = History()
        self._now = 0
        self._next_lesson = self._history.next_lesson
        self._latest: P | None = None
        """The entry that was inserted last."""
        self._returning: Run | None = None
        """The run whose blocks are being used again, `_num_returned` of them, and what they become."""
        self._becomes = self._history.start(0, 1, 0.0)
        self._num_returned = 0
        self._popped: Run | None = None
        """Run of the last victim, until something is added."""
        self._next_victim: P | None = None
        """Its parent, if that is of the same run: a candidate that is not in the list."""

    # What is seen

    def insert(self, entry: P, parent: P | None) -> None:
        self._now += 1
        if self._now >= self._next_lesson:
            self._learn()
        known = self._names.pop(entry.hash, None)
        if known is not None:
            run = self._return(known)
        else:
            run = self._continued(parent) or self._history.start(self._now, 1, 0.0)
            run.cohort.waiting += 1
        self._runs[entry] = run
        self._latest = entry

    def hit(self, entry: P) -> None:
        self._now += 1
        if self._now >= self._next_lesson:
            self._learn()
        self._runs[entry] = self._return(self._runs[entry])

    def forget(self, entry: P) -> None:
        del self._runs[entry]
        self._forks.pop(entry, None)

    # Candidates

    def add(self, entry: P) -> None:
        if self._runs[entry] is self._popped:
            self._next_victim = entry
        else:
            self._places[entry] = len(self._candidates)
            self._candidates.append(entry)
        self._popped = None

    def remove(self, entry: P) -> None:
        if entry is self._next_victim:
            self._next_victim = None
        else:
            self._take(entry)

    def pop(self) -> P:
        entry = self._next_victim
        if entry is not None:
            self._next_victim = None
        else:
            entry = self._worst()
            self._take(entry)
        self._popped = self._names[entry.hash] = self._runs[entry]
        self.forget(entry)
        return entry

    def __len__(self) -> int:
        return len(self._candidates) + (self._next_victim is not None)

    def _take(self, entry: P) -> None:
        place = self._places.pop(entry)
        last = self._candidates.pop()
        if last is not entry:
            self._candidates[place] = last
            self._places[last] = place

    def _worst(self) -> P:
        """Raises IndexError when there is no candidate."""
        while self._doomed:
            entry, run = self._doomed.pop()
            if entry in self._places and self._runs[entry] is run:
                return entry
        self._choose()
        return self._doomed.pop()[0]

    def _choose(self) -> None:
        """New victims: the worst of a sample; of equals the oldest."""
        candidates, random, runs = self._candidates, self._random, self._runs
        count = len(candidates)
        looked_at = candidates
        if count > SAMPLE:
            looked_at = [candidates[int(random() * count)] for _ in range(SAMPLE)]
            looked_at += [entry for entry in self._spare if entry in self._places]
            looked_at = list(dict.fromkeys(looked_at))
        now, index = self._now, self._history.model.index
        aged = ((runs[entry], place, entry) for place, entry in enumerate(looked_at))
        ranked = sorted(
            (index[run.kind][bucket_of(now - run.born)], run.born, place, entry, run) for run, place, entry in aged
        )
        stop = max(1, min(VICTIMS, len(ranked) // 16))
        self._doomed = [(entry, run) for *_, entry, run in reversed(ranked[:stop])]
        self._spare = [item[3] for item in ranked[stop : stop + SPARE]]

    # Learning

    def _continued(self, parent: P | None) -> Run | None:
        """The run of the parent, if a new child goes on with its conversation."""
        if parent is None:
            return None
        if parent is not self._latest:
            forks = self._forks[parent] = self._forks.get(parent, 0) + 1
            if forks >= FORKS:
                return None
        return self._runs[parent]

    def _return(self, run: Run) -> Run:
        """One more block of the run is used again; what run it belongs to now."""
        if run is not self._returning:
            self._count_returned()
            self._returning = run
            now, ticks = self._now, log2(self._now - run.born + 1)
            gap = ticks if run.turn < 2 else (run.gap + ticks) / 2
            # The runs along one prompt's path become one where they are alike.
            if self._becomes.kind != class_of(run.turn + 1, gap) or now - self._becomes.born > 64:
                self._becomes = self._history.start(now, run.turn + 1, gap)
        self._num_returned += 1
        return self._becomes

    def _count_returned(self) -> None:
        if self._returning is not None:
            self._history.returned(self._returning, self._num_returned, self._becomes, self._now)
        self._returning, self._num_returned = None, 0

    def _learn(self) -> None:
        self._count_returned()
        self._forget_names_before(self._history.lesson(self._now, len(self._runs)))
        self._next_lesson = self._history.next_lesson

    def _forget_names_before(self, oldest: int) -> None:
        """Names from before that tick; in order of eviction, so that one that is kept ends the search."""
        names, gone = self._names, []
        for name, run in names.items():
            if run.born >= oldest:
                break
            gone.append(name)
        for name in gone:
            del names[name]
