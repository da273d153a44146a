"""Which evictable thing goes first: the protocol (base.py), one small file per policy, and their names."""

from __future__ import annotations

from anaphora.blocks.eviction.base import Evictable, EvictionPolicy, PriorityPolicy
from anaphora.blocks.eviction.lru import LRU

__all__ = ["LRU", "Evictable", "EvictionPolicy", "PriorityPolicy"]
