"""What is cached beside a sequence: where it parts from its nearest neighbour, and how that one reads on.

tokens      a b c d | e f g h | i j x          num_tokens = 10: i j are shared, x is not
cached      a b c d | e f g h | i j k l | m n
                                ^ Neighbour.start = 8, tokens = i j k l m n
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from anaphora.blocks.hashing import TOKEN_BYTES, HashChain, pack_tokens
from anaphora.blocks.prefix_index import Node, PrefixIndex
from anaphora.types import BlockHash, TokenIds


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A cached sequence that shares whole blocks, and the longest run after them, with another one."""

    hash: BlockHash
    """Of the first block that is not the same in both."""
    start: int
    """Position of that block's first token."""
    shared: int
    """Leading tokens that both have, from position 0."""
    tokens: tuple[int, ...]
    """The neighbour's tokens from `start` on. Where it forks, the way of one of its children."""


def nearest_neighbour(
    index: PrefixIndex, tokens: TokenIds, chain: HashChain, num_blocks: int, span: int
) -> Neighbour | None:
    """Beside the first `num_blocks` blocks of `tokens`; about `span` tokens of it. None where nothing goes on there."""
    root = index.find_root(chain)
    path = index.walk(root, chain, num_blocks) if root is not None else []
    if root is None or len(path) < num_blocks:
        return None
    parent, start = path[-1] if path else root, num_blocks * chain.block_size
    child, run = index.longest_run(parent, pack_tokens(tokens[start : start + chain.block_size]))
    if child is None and parent.sources:
        child = parent.sources[0]
    if child is None:
        return None
    return Neighbour(child.hash, start, start + run, _reads_on(child, span))


def _reads_on(node: Node, span: int) -> tuple[int, ...]:
    packed = bytearray(node.tokens)
    while node.sources and len(packed) < span * TOKEN_BYTES:
        node = node.sources[0]
        packed += node.tokens
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)
