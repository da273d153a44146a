"""Eviction policies by the name users give."""

from __future__ import annotations

from typing import Any

from anaphora.blocks.eviction.arc import ARC
from anaphora.blocks.eviction.base import EvictionPolicy
from anaphora.blocks.eviction.cost_aware import CostAware
from anaphora.blocks.eviction.hazard import Hazard
from anaphora.blocks.eviction.lfu import LFU
from anaphora.blocks.eviction.lru import LRU
from anaphora.blocks.eviction.s3fifo import S3FIFO
from anaphora.blocks.eviction.slru import SLRU
from anaphora.errors import ConfigError

POLICIES: dict[str, type[EvictionPolicy[Any]]] = {
    "lru": LRU,
    "lfu": LFU,
    "slru": SLRU,
    "arc": ARC,
    "s3-fifo": S3FIFO,
    "cost-aware": CostAware,
    "hazard": Hazard,
}
DEFAULT_POLICY = "hazard"
"""The one that wins: see docs/performance.md and benchmarks/replay.py."""


def make_policy(name: str) -> EvictionPolicy[Any]:
    """A new policy of that name. Raises ConfigError."""
    if name not in POLICIES:
        raise ConfigError(f"no eviction policy is called {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name]()
