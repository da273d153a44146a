"""The longest cached prefix of a prompt that every cache group can use.

Positions are absolute. With block_size 4, window 6 and 11 computed tokens:

    position   0 1 2 3 | 4 5 6 7 | 8 9 10 .        the next query, at 11, sees 6 .. 11
    full        block  |  block  |  block          first visible block = (11 - 6 + 1) // 4 = 1
    windowed    NULL   |  block  |  block
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from anaphora.blocks.hashing import HashChain, pack_tokens
from anaphora.blocks.prefix_index import Node, PrefixIndex
from anaphora.types import NULL_BLOCK, TokenIds


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest reusable prefix at the time of the query. Nothing is pinned: open it before the next change.

    tokens [0, block_size * len(nodes)) lie in whole blocks; the rest, up to num_tokens, are the first tokens
    of `source` and have to be copied.
    """

    num_tokens: int
    nodes: tuple[Node, ...]
    source: Node | None

    EMPTY: ClassVar[PrefixMatch]
    """No token; opens an empty table."""


PrefixMatch.EMPTY = PrefixMatch(0, (), None)


def first_visible(num_computed: int, window: int | None, block_size: int) -> int:
    """Index of the first block that a query at position num_computed, or later, can see."""
    return 0 if window is None else max(0, num_computed - window + 1) // block_size


def longest_match(
    index: PrefixIndex, windows: Sequence[int | None], tokens: TokenIds, chain: HashChain, limit: int
) -> PrefixMatch:
    """The longest prefix of at most `limit` tokens present in every group, to the token. `chain` covers `tokens`."""
    root = index.find_root(chain)
    if root is None:
        return PrefixMatch.EMPTY
    size = chain.block_size
    path = index.walk(root, chain, limit // size)
    depth = min((_present(path, g) for g, window in enumerate(windows) if window is None), default=len(path))
    while True:
        # A longer run asks less of the windows: only where the longest there can be would do, look for one.
        gap = _highest_gap(path, depth, windows, (depth + 1) * size, size)
        if gap < 0:
            start = depth * size
            rest = pack_tokens(tokens[start : min(start + size, limit)])
            source, run = index.longest_run(path[depth - 1] if depth else root, rest)
            gap = _highest_gap(path, depth, windows, start + run, size)
            if gap < 0:
                return PrefixMatch(start + run, tuple(path[:depth]), source)
        depth = gap  # every longer prefix needs the block that is missing there


def _present(path: list[Node], group: int) -> int:
    """Leading nodes with a block in a full-attention group (prefix closure: none after the first gap)."""
    return bisect_left(path, True, key=lambda node: node.blocks[group] == NULL_BLOCK)


def _highest_gap(path: list[Node], depth: int, windows: Sequence[int | None], num_tokens: int, size: int) -> int:
    """The last of the first `depth` blocks that a window needs for num_tokens and does not have; -1 if none."""
    gap = -1
    for group, window in enumerate(windows):
        if window is None:
            continue
        for i in range(depth - 1, max(first_visible(num_tokens, window, size) - 1, gap), -1):
            if path[i].blocks[group] == NULL_BLOCK:
                gap = i
                break
    return gap
