"""Our own: keep what promises the most hits for the room and the time it will take until then.

Conversations come back after a think time, one-shot prompts never do; scans never do, loops do on time. How likely
a prefix returns depends on how often it has come back and after how long, and on its age, not monotonically: right
after an answer nobody returns. All three are learned online (return_model.py), in logical time, one tick per block
touched, so the same trace gives the same decisions everywhere.

Blocks used together are one `Run`: they share class and age, so learning and choosing cost per run and not per
block. Evicted blocks leave their run's name behind, for as long as returns are counted: a conversation whose
blocks are gone is known when it comes back. The victim is the worst of a sample of leaves, and then its
ancestors of the same run, while they are leaves.

Related: LHD (Beckmann, Chen, Cidon, NSDI 2018) ranks by hits per space and time, with sampled candidates; the
index is Gittins' (1979). Chains, runs, classes by turn and gap, and names of runs are ours.
"""

from __future__ import annotations

from collections import deque
from math import log2
from random import Random
from typing import TypeVar

from anaphora.blocks.eviction.base import EvictionPolicy, PrefixEntry
from anaphora.blocks.eviction.return_model import ReturnModel, bucket_of, class_of
from anaphora.types import BlockHash

P = TypeVar("P", bound=PrefixEntry)

SAMPLE = 24
"""Leaves looked at anew for each victim."""
SPARE = 12
"""The next worst ones of the last sample, looked at again."""
FORKS = 3
"""Children a block may get before what follows it counts as another conversation (a system prompt has thousands)."""
MEMORY = 8
"""Returns are counted, and names of evicted blocks kept, for as many ticks as MEMORY times the cached blocks."""

RIPE = 3
"""Nothing is learned before that many times the cached blocks were touched: LRU's order until then."""
HALF_LIFE = 64
"""What was learned counts half after as many ticks as HALF_LIFE times the cached blocks: habits change."""


class Run:
    """Blocks used together: when, in which class, and how many of them have not been used again."""

    __slots__ = ("born", "gap", "kind", "live", "turn")

    def __init__(self, born: int, kind: int, turn: int, gap: float) -> None:
        self.born = born
        self.kind = kind
        self.turn = turn
        """Uses so far, of the prefix it continues."""
        self.gap = gap
        """Log2 of the ticks between uses, averaged with more weight on the last."""
        self.live = 0


class _State:
    """Of a cached entry."""

    __slots__ = ("children", "place", "run")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.children = 0
        """Different ones, ever."""
        self.place = -1
        """Index in the list of candidates."""


class Hazard(EvictionPolicy[P]):
    """Lowest expected hits per block and tick goes first."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed).random
        self._states: dict[P, _State] = {}
        self._candidates: list[P] = []
        self._spare: list[P] = []
        self._names: dict[BlockHash, Run] = {}
        """Of evicted blocks, the first evicted first."""
        self._log: deque[Run] = deque()
        self._model = ReturnModel()
        self._now = 0
        self._next_lesson = 512
        self._returning: Run | None = None
        """The run whose blocks are being used again, `_num_returned` of them, and what they become."""
        self._becomes = Run(0, 0, 1, 0.0)
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
        above = self._states[parent] if parent is not None else None
        if (known := self._names.pop(entry.hash, None)) is not None:
            run = self._return(known)
        else:
            continues = above if above is not None and above.children < FORKS else None
            run = continues.run if continues is not None else self._start(class_of(1, 0.0), 1, 0.0)
            run.live += 1
            if above is not None:
                above.children += 1
        self._states[entry] = _State(run)

    def hit(self, entry: P) -> None:
        self._now += 1
        if self._now >= self._next_lesson:
            self._learn()
        state = self._states[entry]
        state.run = self._return(state.run)

    def forget(self, entry: P) -> None:
        del self._states[entry]

    # Candidates

    def add(self, entry: P) -> None:
        state = self._states[entry]
        if state.run is self._popped:
            self._next_victim = entry
        else:
            state.place = len(self._candidates)
            self._candidates.append(entry)
        self._popped = None

    def remove(self, entry: P) -> None:
        if entry is self._next_victim:
            self._next_victim = None
            return
        state = self._states[entry]
        if state.place < 0:
            raise KeyError(entry)
        self._take(entry, state)

    def pop(self) -> P:
        if (entry := self._next_victim) is not None:
            self._next_victim = None
            state = self._states.pop(entry)
        else:
            entry = self._worst()
            state = self._states.pop(entry)
            self._take(entry, state)
        self._popped = self._names[entry.hash] = state.run
        return entry

    def __len__(self) -> int:
        return len(self._candidates) + (self._next_victim is not None)

    def _take(self, entry: P, state: _State) -> None:
        last = self._candidates.pop()
        if last is not entry:
            self._candidates[state.place] = last
            self._states[last].place = state.place
        state.place = -1

    def _worst(self) -> P:
        """Of a sample; of equals the oldest. Raises IndexError when there is no candidate."""
        candidates, states, random = self._candidates, self._states, self._random
        count = len(candidates)
        if count <= SAMPLE:
            looked_at = set(candidates)
        else:
            looked_at = {candidates[int(random() * count)] for _ in range(SAMPLE)}
            looked_at.update(e for e in self._spare if e in states and states[e].place >= 0)
        if not looked_at:
            raise IndexError("no candidate")
        now, index = self._now, self._model.index
        ranked = []
        for entry in looked_at:
            run = states[entry].run
            age = now - run.born
            ranked.append((index[run.kind][bucket_of(age)], -age, states[entry].place, entry))
        ranked.sort()
        self._spare = [item[3] for item in ranked[1 : SPARE + 1]]
        return ranked[0][3]

    # Learning

    def _start(self, kind: int, turn: int, gap: float) -> Run:
        run = Run(self._now, kind, turn, gap)
        self._log.append(run)
        return run

    def _return(self, run: Run) -> Run:
        """One more block of the run is used again; what run it belongs to now."""
        if run is not self._returning:
            self._count_returned()
            self._returning = run
            now, ticks = self._now, log2(self._now - run.born + 1)
            gap = ticks if run.turn < 2 else (run.gap + ticks) / 2
            kind = class_of(run.turn + 1, gap)
            # The runs along one prompt's path become one where they are alike.
            if self._becomes.kind != kind or now - self._becomes.born > 64:
                self._becomes = self._start(kind, run.turn + 1, gap)
        self._num_returned += 1
        self._becomes.live += 1
        return self._becomes

    def _count_returned(self) -> None:
        if self._num_returned and self._returning is not None:
            self._model.returned(self._returning.kind, self._now - self._returning.born, self._num_returned)
            self._returning.live -= self._num_returned
        self._num_returned = 0

    def _learn(self) -> None:
        self._count_returned()
        self._returning = None
        size = max(1, len(self._states))
        oldest = self._now - MEMORY * size
        while self._log and self._log[0].born < oldest:
            gone = self._log.popleft()
            self._model.stayed_away(gone.kind, gone.live)
        self._forget_names_before(oldest)
        ticks = min(self._now, max(4096, size))
        if self._now >= RIPE * size:
            self._model.learn([(run.kind, self._now - run.born, run.live) for run in self._log if run.live > 0])
            self._model.age(0.5 ** (ticks / (HALF_LIFE * size)))
        self._next_lesson = self._now + ticks

    def _forget_names_before(self, oldest: int) -> None:
        """Names from before that tick; in order of eviction, so that one that is kept ends the search."""
        names, gone = self._names, []
        for name, run in names.items():
            if run.born >= oldest:
                break
            gone.append(name)
        for name in gone:
            del names[name]
