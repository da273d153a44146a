"""Least frequently used, with dynamic aging.

LFU-DA (Arlitt, Cherkasova, Dilley, Friedrich, Jin: Evaluating Content Management Techniques for Web Proxy Caches,
1999): priority = uses + age of the cache at the last use, where the age is the priority of whatever went last.
So yesterday's favourite loses to what is used today.
"""

from __future__ import annotations

from anaphora.blocks.eviction.base import PriorityPolicy, T


class LFU(PriorityPolicy[T]):
    """Fewest uses since it came, plus the cache's age when it was last used; then least recently used."""

    def __init__(self) -> None:
        super().__init__()
        self._age = 0.0
        self._uses: dict[T, float] = {}
        self._value: dict[T, float] = {}

    def insert(self, entry: T, parent: T | None) -> None:
        self._uses[entry] = 0.0
        self.hit(entry)

    def hit(self, entry: T) -> None:
        uses = self._uses[entry] = self._uses[entry] + self.weight(entry)
        self._value[entry] = self._age + uses

    def weight(self, entry: T) -> float:
        """What one use counts."""
        return 1.0

    def forget(self, entry: T) -> None:
        del self._uses[entry], self._value[entry]

    def priority(self, entry: T) -> tuple[float, ...]:
        return self._value[entry], entry.last_used

    def pop(self) -> T:
        entry = super().pop()
        self._age = max(self._age, self._value[entry])
        self.forget(entry)
        return entry
