"""Blocks on their way out of the pool: held until the tiers have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anaphora.blocks.hashing import TOKEN_BYTES
from anaphora.blocks.manager import KVCacheManager
from anaphora.blocks.pool import Block
from anaphora.engine.request import Request
from anaphora.engine.tiering.blocks import PoolBlocks
from anaphora.tiers.break_even import PrefillSpeed
from anaphora.tiers.hierarchy import Hierarchy
from anaphora.tiers.store import BlockMeta
from anaphora.tiers.transfers import Save
from anaphora.types import NULL_BLOCK, BlockId, RequestId

_MOST_HELD = 4
"""One block of the pool in so many may be held for the tiers; what is computed meanwhile is offered later."""
_Send = Callable[[Sequence[BlockMeta], Sequence[memoryview]], Save | None]


class Outbox:
    """Pins what is being stored. Not thread-safe: the engine's thread calls it."""

    def __init__(self, hierarchy: Hierarchy, cache: KVCacheManager, blocks: PoolBlocks) -> None:
        self._hierarchy = hierarchy
        self._cache = cache
        self._blocks = blocks
        self._ram = next((i for i, tier in enumerate(hierarchy.tiers) if tier.store.name == "ram"), None)
        self._offered: dict[RequestId, int] = {}
        """Of running requests: leading blocks that were offered to the tiers, or came from somewhere."""
        self._held: dict[Save, list[BlockId]] = {}
        self._num_held = 0

    @property
    def busy(self) -> bool:
        """Whether any block is held."""
        return bool(self._held)

    def begin(self, request: Request, num_matched: int) -> None:
        """The request runs; its first `num_matched` blocks were in the pool."""
        self._offered[request.request_id] = num_matched

    def forget(self, request_id: RequestId) -> None:
        """The request runs no longer."""
        self._offered.pop(request_id, None)

    def computed(self, request: Request) -> None:
        """Offer the blocks that became whole; as many as may be held, the rest the next time."""
        start = self._offered[request.request_id]
        full = min(request.num_computed_tokens // self._cache.block_size, len(request.chain.hashes))
        stop = min(full, start + self._room() // len(self._cache.windows))
        if stop > start:
            self._offered[request.request_id] = stop
            self._send(request, _whole(request, start, stop), self._hierarchy.computed)

    def swap_out(self, request: Request, computing: PrefillSpeed | None) -> None:
        """Offer the blocks that RAM lacks, from the first; it alone gets them.

        `computing`: leave it where that brings them back sooner than RAM does; None: never.
        """
        if self._ram is None:
            return
        num_tokens = request.num_computed_tokens
        nbytes = self._cache.blocks_for(num_tokens) * self._blocks.block_bytes
        loading = self._hierarchy.speeds()[self._ram].seconds(nbytes)
        if computing is not None and computing.seconds(0, num_tokens) <= loading:
            return
        full = min(num_tokens // self._cache.block_size, len(request.chain.hashes))
        places = _whole(request, 0, full)
        here = self._hierarchy.tiers[self._ram].store.contains(
            [self._blocks.meta(request.chain, d, g).key for g, d in places]
        )
        missing = [place for place, there in zip(places, here, strict=True) if not there]
        self._send(request, missing[: self._room()], self._hierarchy.swap_out)

    def evicted(self, block: Block) -> None:
        """The pool gives the block up: its bytes are copied before this returns."""
        node = block.node
        if node is not None and len(node.tokens) == self._cache.block_size * TOKEN_BYTES:
            self._hierarchy.evicted(self._blocks.meta_of(block, node), self._blocks.view(block.id))

    def over(self, save: Save) -> None:
        """The tiers read these no more."""
        ids = self._held.pop(save)
        self._num_held -= len(ids)
        self._cache.let_go(ids)

    def _room(self) -> int:
        return max(0, max(len(self._cache.windows), self._cache.num_blocks // _MOST_HELD) - self._num_held)

    def _send(self, request: Request, places: Sequence[tuple[int, int]], send: _Send) -> None:
        """Give (group, depth) of the request's table to the tiers. State changes: the blocks are held until `over`."""
        if not places:
            return
        assert request.table is not None
        groups, chain = request.table.groups, request.chain
        ids = [groups[g][d] for g, d in places]
        save = send([self._blocks.meta(chain, d, g) for g, d in places], [self._blocks.view(i) for i in ids])
        if save is not None:
            self._cache.hold(ids)
            self._held[save] = ids
            self._num_held += len(ids)


def _whole(request: Request, start: int, stop: int) -> list[tuple[int, int]]:
    """(group, depth) of the table's blocks start .. stop that no window has passed; parents before children."""
    assert request.table is not None
    groups = request.table.groups
    return [(g, d) for d in range(start, stop) for g, blocks in enumerate(groups) if blocks[d] != NULL_BLOCK]
