"""Pins with a time to live: what a request asked to keep goes last, and never more than a share of the pool."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Generic

from anaphora.blocks.eviction.base import T


class Pins(Generic[T]):
    """Pinned entries, and those among them that may be evicted when nothing else is left.

    At most `limit` entries are pinned at a time. `clock` gives seconds. A pin that ran out is let go by `expire`;
    the owner calls it before it asks anything else.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._clock = clock
        self._until: dict[T, float] = {}
        self._candidates: set[T] = set()
        self._heap: list[tuple[float, int, T]] = []
        self._serial = 0

    def __len__(self) -> int:
        """Pinned entries."""
        return len(self._until)

    def __contains__(self, entry: T) -> bool:
        return entry in self._until

    @property
    def num_candidates(self) -> int:
        return len(self._candidates)

    def pin(self, entry: T, seconds: float) -> bool:
        """Keep the entry for that long, or as long as it is pinned already. False: the limit is reached.

        The entry must be no candidate at the moment (or one of `add` here).
        """
        until = self._clock() + seconds
        known = self._until.get(entry)
        if known is None and len(self._until) >= self.limit:
            return False
        if known is None or until > known:
            self._until[entry] = until
            self._serial += 1
            heappush(self._heap, (until, self._serial, entry))
        return True

    def forget(self, entry: T) -> None:
        """The entry is gone, or no longer to be kept; it is no candidate here. Not pinned: nothing changes."""
        self._until.pop(entry, None)

    def add(self, entry: T) -> None:
        """A pinned entry may be evicted if need be."""
        self._candidates.add(entry)

    def remove(self, entry: T) -> None:
        """Raises KeyError when it is no candidate here."""
        self._candidates.remove(entry)

    def pop(self) -> T:
        """Take out the candidate whose pin runs out first. Raises IndexError when there is none. O(pins)."""
        if not self._candidates:
            raise IndexError("no pinned entry may be evicted")
        entry = min(self._candidates, key=lambda e: (self._until[e], e.last_used))
        self._candidates.remove(entry)
        del self._until[entry]
        return entry

    def expire(self) -> list[T]:
        """Let go of every pin that ran out; returns those entries that were candidates, which they no longer are."""
        freed: list[T] = []
        now = self._clock() if self._heap else 0.0
        while self._heap and self._heap[0][0] <= now:
            until, _, entry = heappop(self._heap)
            if self._until.get(entry) != until:
                continue  # pinned for longer since, or gone
            del self._until[entry]
            if entry in self._candidates:
                self._candidates.remove(entry)
                freed.append(entry)
        return freed
