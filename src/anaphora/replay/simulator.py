"""The server's own pool, prefix index and policy, driven by a trace; nothing is stored, only counted.

A request is at once admitted, computed and closed: its blocks are active together, then cached, tail first. Of a
prompt longer than the pool the leading blocks that fit are kept. Memory grows with the pool, not with the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from anaphora.blocks.eviction import EvictionPolicy
from anaphora.blocks.hashing import HashChain
from anaphora.blocks.pool import Block, BlockPool
from anaphora.blocks.prefix_index import Node
from anaphora.errors import InputError
from anaphora.replay.readers.base import TraceRequest
from anaphora.types import NULL_BLOCK, BlockHash

_KEY = b"replay".ljust(32, b"\0")


@dataclass(slots=True)
class HitCounts:
    """What a replay found."""

    requests: int = 0
    blocks: int = 0
    """Blocks of all prompts."""
    hit_blocks: int = 0
    """Of those, in the leading run that was cached."""
    tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0

    @property
    def block_hit_rate(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0


class Beyond(Protocol):
    """What lies behind the pool: the seam where tiers are put in."""

    def fetch(self, missing: Sequence[BlockHash]) -> int:
        """How many leading blocks of `missing` can be loaded; they enter the pool."""

    def leave(self, block: Block) -> None:
        """The pool is about to evict the block (its `hash` and `depth` can still be read)."""


class PoolReplay:
    """A pool of `num_blocks` blocks under a policy. `request` is one request's whole life."""

    def __init__(self, num_blocks: int, policy: EvictionPolicy[Block], beyond: Beyond | None = None) -> None:
        self._beyond = beyond
        self.now = 0.0
        """Arrival of the request at hand, in seconds: the clock of pins."""
        self.pool = BlockPool(num_blocks, [True], policy, clock=lambda: self.now)
        if beyond is not None:
            self.pool.evict_listeners.append(beyond.leave)
        prefixes = self.pool.prefixes
        prefixes.pin(prefixes.root(_named_chain([])))  # a prompt may push out all others, and hangs on it all the same

    def request(self, blocks: list[BlockHash], arrival: float = 0.0) -> tuple[int, int]:
        """(leading blocks found in the pool, further ones loaded from beyond it). Then all that fit are cached."""
        self.now = arrival
        pool, index = self.pool, self.pool.prefixes
        chain = _named_chain(blocks)
        root = index.root(chain)
        path = index.walk(root, chain, len(blocks))
        found = 0
        table = []
        for node in path:
            if (block := node.blocks[0]) == NULL_BLOCK:
                break
            pool.acquire(block)
            table.append(block)
        found = len(table)
        loaded = self._beyond.fetch(blocks[found:]) if self._beyond is not None and found < len(blocks) else 0
        fresh = pool.allocate(min(len(blocks), pool.num_blocks) - found)
        parent: Node = path[found - 1] if found else root
        for digest, block in zip(blocks[found:], fresh, strict=False):
            child = index.child(parent, digest, digest)
            if child is None:
                raise InputError(
                    f"block {int.from_bytes(digest[:16], 'little')} follows two different ones; a hash id must stand "
                    "for its block and all before it. Is this a trace of chained hash ids?"
                )
            pool.index(block, 0, child)
            parent = child
        table += fresh
        for block in reversed(table):
            pool.release(block)
        return found, loaded


def replay(
    requests: Iterable[TraceRequest], num_blocks: int, policy: EvictionPolicy[Block], block_size: int = 16
) -> HitCounts:
    """Hits of a pool without tiers. `block_size`: of traces that hold token ids."""
    cache, counts = PoolReplay(num_blocks, policy), HitCounts()
    for request in requests:
        blocks = request.blocks(block_size)
        found, _ = cache.request(blocks, request.arrival)
        counts.requests += 1
        counts.blocks += len(blocks)
        counts.hit_blocks += found
        counts.tokens += request.input_length
        counts.hit_tokens += min(found * (request.block_size or block_size), request.input_length)
    counts.evictions = cache.pool.evictions
    return counts


def _named_chain(blocks: list[BlockHash]) -> HashChain:
    """A chain of given names: the trace says what a block is, so its name stands for its tokens."""
    chain = HashChain(_KEY, 1)
    chain.hashes = chain.packed = blocks  # type: ignore[assignment]
    return chain
