"""Greedy-dual by frequency and cost: what is dear to compute again stays longer.

GDSF (Cherkasova, Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching, HP Labs 1998), with
blocks of one size. A block of n tokens at position p costs n x (a + b x p): projections are the same for every
token, attention grows with what lies before. `doubling_depth` is a / b in blocks.
"""

from __future__ import annotations

from typing import TypeVar

from anaphora.blocks.eviction.base import PrefixEntry
from anaphora.blocks.eviction.lfu import LFU

P = TypeVar("P", bound=PrefixEntry)


class CostAware(LFU[P]):
    """LFU in which a use counts as much as the block costs, in units of a first block's cost."""

    def __init__(self, doubling_depth: float = 64.0) -> None:
        super().__init__()
        self._per_block = 1.0 / doubling_depth

    def weight(self, entry: P) -> float:
        return 1.0 + self._per_block * entry.depth
