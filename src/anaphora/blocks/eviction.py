"""Which evictable thing goes first. One small object, shared by the block pool, the tiers and the replay.

The owner (a pool, a tier) decides what *may* go and tells the policy through `add` and `remove`: an entry is
a candidate only while nobody uses it and no cached child needs it. So prefix closure (leaves first, never a
parent before its child) holds whatever the policy prefers, and the policy only orders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar


class Evictable(Protocol):
    """What a policy sees of an entry. Hashable by identity."""

    @property
    def last_used(self) -> int:
        """The owner's logical clock when the entry was last let go."""


T = TypeVar("T", bound=Evictable)


class EvictionPolicy(Protocol[T]):
    """The set of candidates, in the order in which they go."""

    def add(self, entry: T) -> None:
        """The entry may be evicted from now on (first use, or again after `remove`)."""

    def remove(self, entry: T) -> None:
        """The entry may not be evicted now. Raises KeyError when it is no candidate."""

    def pop(self) -> T:
        """Take out the entry that goes first. Raises IndexError when there is no candidate."""

    def __len__(self) -> int:
        """Number of candidates."""


class PriorityPolicy(ABC, Generic[T]):
    """Policies whose order is one number per entry, fixed when it becomes a candidate; lowest goes first.

    A heap with lazy deletion: `add` and `pop` O(log n), `remove` O(1); stale items are swept out when they
    outnumber the candidates. Equal priorities leave in the order they came.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._serial: dict[T, int] = {}
        self._next = 0

    @abstractmethod
    def priority(self, entry: T) -> float:
        """Lowest is evicted first."""

    def add(self, entry: T) -> None:
        self._next += 1
        self._serial[entry] = self._next
        heappush(self._heap, (self.priority(entry), self._next, entry))

    def remove(self, entry: T) -> None:
        del self._serial[entry]
        if len(self._heap) > 2 * len(self._serial) + 64:
            self._heap = [item for item in self._heap if self._serial.get(item[2]) == item[1]]
            heapify(self._heap)

    def pop(self) -> T:
        while True:
            _, serial, entry = heappop(self._heap)
            if self._serial.get(entry) == serial:
                del self._serial[entry]
                return entry

    def __len__(self) -> int:
        return len(self._serial)


class LRU(PriorityPolicy[T]):
    """Least recently used first."""

    def priority(self, entry: T) -> float:
        return entry.last_used
