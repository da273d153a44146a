"""The block tables of one running request."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.blocks.prefix_index import Node
from anaphora.types import BlockId


@dataclass(slots=True, eq=False)
class BlockTable:
    """One block table per cache group, all of the same length. Changed by KVCacheManager only."""

    groups: list[list[BlockId]]
    """groups[g][i] holds positions i * block_size .. (i + 1) * block_size - 1; NULL_BLOCK where a window passed."""
    first: list[int]
    """Per group: the first entry that no window has passed."""
    indexed: list[int]
    """Per group: the first entry that is not yet settled in the prefix index."""
    path: list[Node]
    """Index nodes of the leading full blocks."""
    tip: Node | None
    """Pinned: path[-1], or the namespace's root; None before the first commit of an empty table."""
    epoch: int
    """The index's epoch when it was opened."""
    closed: bool = False
