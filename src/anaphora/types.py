"""Names for the plain values that cross layer borders (standard library only)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""16-byte chained digest of one full block and everything before it."""

BlockId = NewType("BlockId", int)
"""Index of a block in the pool, 0 .. num_blocks - 1."""

RequestId = NewType("RequestId", str)
"""Name of one sequence of tokens in the engine; unique while it is alive."""

TokenIds = Sequence[int]
"""Token ids as the tokenizer gives them."""

NULL_BLOCK = BlockId(-1)
"""Stands in a block table where a sliding window has passed: never read, never written."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_tokens` slots of block `src` to block `dst`, every layer of the block."""

    src: BlockId
    dst: BlockId
    num_tokens: int
