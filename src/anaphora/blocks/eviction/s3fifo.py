"""S3-FIFO: a small queue that one-time entries leave quickly (Yang, Zhang, Qiu, Yue, Rashmi, SOSP 2023)."""

from __future__ import annotations

from typing import TypeVar

from anaphora.blocks.eviction.base import Candidates, EvictionPolicy, PrefixEntry
from anaphora.blocks.eviction.ghosts import Ghosts

P = TypeVar("P", bound=PrefixEntry)


class _State:
    """Of a cached entry: its queue, its place there, and its uses since it entered it (at most 3)."""

    __slots__ = ("main", "turn", "uses")

    def __init__(self, main: bool, turn: int) -> None:
        self.main = main
        self.turn = turn
        self.uses = 0


class S3FIFO(EvictionPolicy[P]):
    """A small and a main first-in-first-out queue, and the names of what the small one lost.

    As in the paper, but that only candidates can go: a queue's first candidate stands for its first entry, and of
    blocks that came together the child is first.
    """

    def __init__(self, small_share: float = 0.1) -> None:
        self._share = small_share
        self._states: dict[P, _State] = {}
        self._num_small = 0
        self._small: Candidates[P] = Candidates()
        self._main: Candidates[P] = Candidates()
        self._ghosts = Ghosts()
        self._turn = 0

    def insert(self, entry: P, parent: P | None) -> None:
        main = self._ghosts.discard(entry.hash)
        self._states[entry] = _State(main, self._next_turn())
        self._num_small += not main

    def hit(self, entry: P) -> None:
        state = self._states[entry]
        state.uses = min(3, state.uses + 1)

    def forget(self, entry: P) -> None:
        self._num_small -= not self._states.pop(entry).main

    def add(self, entry: P) -> None:
        state = self._states[entry]
        (self._main if state.main else self._small).add(entry, state.turn)

    def remove(self, entry: P) -> None:
        (self._main if self._states[entry].main else self._small).remove(entry)

    def pop(self) -> P:
        while True:
            small = self._num_small > self._share * len(self._states) or not len(self._main)
            if small and len(self._small):
                entry = self._small.pop()
                state = self._states[entry]
                if state.uses < 2:
                    self._ghosts.add(entry.hash)
                    self._ghosts.trim(int((1 - self._share) * len(self._states)))
                    self.forget(entry)
                    return entry
                state.main, state.uses = True, 0
                self._num_small -= 1
            else:
                entry = self._main.pop()
                state = self._states[entry]
                if not state.uses:
                    self.forget(entry)
                    return entry
                state.uses -= 1
            state.turn = self._next_turn()
            self._main.add(entry, state.turn)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn
