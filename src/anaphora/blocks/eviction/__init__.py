"""Which evictable thing goes first: the protocol (base.py), one small file per policy, their names (registry.py)."""

from __future__ import annotations

from anaphora.blocks.eviction.base import Evictable, EvictionPolicy, PrefixEntry, PriorityPolicy
from anaphora.blocks.eviction.lru import LRU
from anaphora.blocks.eviction.pins import Pins
from anaphora.blocks.eviction.registry import DEFAULT_POLICY, POLICIES, make_policy

__all__ = [
    "DEFAULT_POLICY",
    "LRU",
    "POLICIES",
    "Evictable",
    "EvictionPolicy",
    "Pins",
    "PrefixEntry",
    "PriorityPolicy",
    "make_policy",
]
