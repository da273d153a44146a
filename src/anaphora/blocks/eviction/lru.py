"""Least recently used."""

from __future__ import annotations

from anaphora.blocks.eviction.base import PriorityPolicy, T


class LRU(PriorityPolicy[T]):
    """Least recently used first."""

    def priority(self, entry: T) -> float:
        return entry.last_used
