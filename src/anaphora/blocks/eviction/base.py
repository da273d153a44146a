"""What an eviction policy is. One small object, shared by the block pool, the tiers and the replay.

The owner (a pool, a tier) decides what *may* go and tells the policy through `add` and `remove`: an entry is
a candidate only while nobody uses it and no cached child needs it. So prefix closure (leaves first, never a
parent before its child) holds whatever the policy prefers, and the policy only orders.

    insert -> { remove, hit -> add } -> pop            add and remove: only while the entry is a leaf nobody uses
                                     `-> forget        gone without having been chosen
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heapify, heappop, heappush
from typing import Any, Generic, Protocol, TypeVar

from anaphora.types import BlockHash


class Evictable(Protocol):
    """The least that a policy sees of an entry. Hashable by identity."""

    @property
    def last_used(self) -> int:
        """The owner's logical clock when the entry was last let go. A parent's is never below its child's."""


class PrefixEntry(Evictable, Protocol):
    """An entry in a tree of prefixes, for policies that learn from what came back after it was gone."""

    @property
    def hash(self) -> BlockHash:
        """Identity of the content; still that when the entry is popped."""

    @property
    def depth(self) -> int:
        """Blocks before it in its sequence."""


T = TypeVar("T", bound=Evictable)


class EvictionPolicy(Protocol[T]):
    """The candidates, in the order in which they go, and what was seen of everything cached.

    Every entry is inserted before it is first added. `insert`, `hit` and `forget` do nothing unless a policy says
    otherwise: one that goes by last use alone needs none of them.
    """

    def add(self, entry: T) -> None:
        """The entry may be evicted from now on (first use, or again after `remove`)."""

    def remove(self, entry: T) -> None:
        """The entry may not be evicted now. Raises KeyError when it is no candidate."""

    def pop(self) -> T:
        """Take out the entry that goes first, and forget it. Raises IndexError when there is no candidate."""

    def __len__(self) -> int:
        """Number of candidates."""

    def insert(self, entry: T, parent: T | None) -> None:
        """The entry is cached from now on, below `parent` (None: the first block, or the owner does not say)."""
        return

    def hit(self, entry: T) -> None:
        """The entry, which is cached, is used again; parents are told before their children."""
        return

    def forget(self, entry: T) -> None:
        """The entry is no longer cached, though nobody popped it. It is no candidate."""
        return


class Candidates(Generic[T]):
    """Entries by a priority fixed when they are added; lowest goes first.

    A heap with lazy deletion: `add` and `pop` O(log n), `remove` O(1); stale items are swept out when they
    outnumber the candidates. Equal priorities leave in the order they came.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, T]] = []
        self._serial: dict[T, int] = {}
        self._next = 0

    def add(self, entry: T, priority: float | tuple[float, ...]) -> None:
        """Priorities of one object are all of the same kind."""
        self._next += 1
        self._serial[entry] = self._next
        heappush(self._heap, (priority, self._next, entry))

    def remove(self, entry: T) -> None:
        """Raises KeyError when it is no candidate."""
        del self._serial[entry]
        if len(self._heap) > 2 * len(self._serial) + 64:
            self._heap = [item for item in self._heap if self._serial.get(item[2]) == item[1]]
            heapify(self._heap)

    def pop(self) -> T:
        """Raises IndexError when there is no candidate."""
        while True:
            _, serial, entry = heappop(self._heap)
            if self._serial.get(entry) == serial:
                del self._serial[entry]
                return entry

    def __contains__(self, entry: T) -> bool:
        return entry in self._serial

    def __len__(self) -> int:
        return len(self._serial)


class PriorityPolicy(ABC, EvictionPolicy[T]):
    """Policies whose order is one number per entry, fixed when it becomes a candidate."""

    def __init__(self) -> None:
        self._candidates: Candidates[T] = Candidates()

    @abstractmethod
    def priority(self, entry: T) -> float | tuple[float, ...]:
        """Lowest is evicted first."""

    def add(self, entry: T) -> None:
        self._candidates.add(entry, self.priority(entry))

    def remove(self, entry: T) -> None:
        self._candidates.remove(entry)

    def pop(self) -> T:
        return self._candidates.pop()

    def __len__(self) -> int:
        return len(self._candidates)
