"""ARC: adaptive replacement between recency and frequency (Megiddo, Modha, FAST 2003)."""

from __future__ import annotations

from typing import TypeVar

from anaphora.blocks.eviction.base import Candidates, EvictionPolicy, PrefixEntry
from anaphora.blocks.eviction.ghosts import Ghosts

P = TypeVar("P", bound=PrefixEntry)


class ARC(EvictionPolicy[P]):
    """Two lists by last use, of entries used once and more than once, and the names of what each lost lately.

    A name that comes back moves the target size of the first list, `_target`, towards the list that lost it. As
    in the paper, but that only candidates can go: a list without one gives way to the other.
    """

    def __init__(self) -> None:
        self._often: dict[P, bool] = {}
        self._num_often = 0
        self._once: Candidates[P] = Candidates()
        self._more: Candidates[P] = Candidates()
        self._once_ghosts = Ghosts()
        self._more_ghosts = Ghosts()
        self._target = 0.0

    def insert(self, entry: P, parent: P | None) -> None:
        once, more, size = self._once_ghosts, self._more_ghosts, len(self._often) + 1
        often = True
        if once.discard(entry.hash):
            self._target = min(self._target + max(1.0, len(more) / (len(once) + 1)), float(size))
        elif more.discard(entry.hash):
            self._target = max(self._target - max(1.0, len(once) / (len(more) + 1)), 0.0)
        else:
            often = False
        self._often[entry] = often
        self._num_often += often

    def hit(self, entry: P) -> None:
        self._num_often += not self._often[entry]
        self._often[entry] = True

    def forget(self, entry: P) -> None:
        self._num_often -= self._often.pop(entry)

    def add(self, entry: P) -> None:
        (self._more if self._often[entry] else self._once).add(entry, entry.last_used)

    def remove(self, entry: P) -> None:
        (self._more if entry in self._more else self._once).remove(entry)

    def pop(self) -> P:
        size = len(self._often)
        num_once = size - self._num_often
        from_once = num_once > self._target or not self._num_often
        if not len(self._once if from_once else self._more):
            from_once = not from_once
        entry = (self._once if from_once else self._more).pop()
        ghosts = self._once_ghosts if from_once else self._more_ghosts
        self.forget(entry)
        ghosts.add(entry.hash)
        self._once_ghosts.trim(size - num_once + from_once)
        self._more_ghosts.trim(2 * size - (size - 1) - len(self._once_ghosts))
        return entry

    def __len__(self) -> int:
        return len(self._once) + len(self._more)
