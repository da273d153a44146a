"""One step's work, frozen: what the scheduler decided and the model runner executes.

row.token_ids sit at positions start .. start + len - 1. Position p of cache group g lives in

    block  = row.block_tables[g][p // block_size]
    offset = p % block_size

A block table covers every position up to and including the row's last; entries that a sliding
window has passed are NULL_BLOCK.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from anaphora.types import BlockCopy, RequestId


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request's share of a step."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    start: int
    """num_computed_tokens before this step = position of token_ids[0]."""
    block_tables: tuple[Sequence[int], ...]
    """One per cache group. The scheduler's are arrays of 32-bit integers, so that no step converts every entry."""
    sample: bool
    """True when the logits after the row's last token are wanted."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Copies first (all sources are read before any write of the step), then the rows."""

    rows: tuple[BatchRow, ...]
    copies: tuple[BlockCopy, ...] = ()
    every: bool = False
    """True when the logits after every token of the rows with `sample` are wanted, not only after their last."""

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def token_ids(self) -> list[int]:
        """[T]: the rows' tokens laid end to end."""
        return [token for row in self.rows for token in row.token_ids]

    @property
    def positions(self) -> list[int]:
        """[T], each within its own sequence."""
        return [p for row in self.rows for p in range(row.start, row.start + len(row.token_ids))]

    @property
    def wanted(self) -> list[int]:
        """Numbers along T of the tokens whose logits are wanted."""
        ends = accumulate(len(row.token_ids) for row in self.rows)
        return [
            token
            for end, row in zip(ends, self.rows, strict=True)
            if row.sample
            for token in range(end - len(row.token_ids) if self.every else end - 1, end)
        ]
