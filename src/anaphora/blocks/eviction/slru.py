"""Segmented LRU (Karedla, Love, Wherry: Caching Strategies to Improve Disk System Performance, 1994)."""

from __future__ import annotations

from collections import OrderedDict

from anaphora.blocks.eviction.base import PriorityPolicy, T


class SLRU(PriorityPolicy[T]):
    """What was never used again goes before what was; at most `protected_share` of the entries enjoy that.

    Beyond it the least recently used protected entry falls back among the others, where its last use counts.
    """

    def __init__(self, protected_share: float = 0.5) -> None:
        super().__init__()
        self._share = protected_share
        self._known: set[T] = set()
        self._protected: OrderedDict[T, None] = OrderedDict()

    def insert(self, entry: T, parent: T | None) -> None:
        self._known.add(entry)

    def hit(self, entry: T) -> None:
        self._protected[entry] = None
        self._protected.move_to_end(entry)
        while len(self._protected) > self._share * len(self._known):
            fallen, _ = self._protected.popitem(last=False)
            if fallen in self._candidates:
                self.remove(fallen)
                self.add(fallen)

    def forget(self, entry: T) -> None:
        self._known.remove(entry)
        self._protected.pop(entry, None)

    def priority(self, entry: T) -> tuple[float, ...]:
        return entry in self._protected, entry.last_used

    def pop(self) -> T:
        entry = super().pop()
        self.forget(entry)
        return entry
