"""Making computed blocks findable: full blocks after a step, the partial tail at the end."""

from __future__ import annotations

from collections.abc import Sequence

from anaphora.blocks.hashing import TOKEN_BYTES, HashChain, block_hash, pack_tokens
from anaphora.blocks.pool import BlockPool
from anaphora.blocks.prefix_index import Node
from anaphora.blocks.table import BlockTable
from anaphora.types import NULL_BLOCK, TokenIds


class Publisher:
    """Writes tables into the prefix index and keeps it free of entries that serve nobody."""

    def __init__(self, pool: BlockPool, windows: Sequence[int | None], block_size: int) -> None:
        self._pool = pool
        self._index = pool.prefixes
        self._windows = windows
        self._block_size = block_size

    def full_blocks(
        self, table: BlockTable, tokens: TokenIds, chain: HashChain, num_computed: int, *, closing: bool
    ) -> None:
        """Index the table's full blocks. Where another block is indexed for the same content, ours is not.

        Unless closing, a full-attention group stops there: a block that is active and indexed below one which
        its request does not hold would keep that one from being evicted, and the request from getting the
        blocks it was promised.
        """
        full = num_computed // self._block_size
        if table.tip is not None and min(table.indexed) >= full:
            return
        chain.extend(tokens)
        self._extend_path(table, chain, full)
        path = table.path
        lowest = len(path)
        for group, blocks in enumerate(table.groups):
            stops = self._windows[group] is None and not closing
            i = table.indexed[group]
            while i < len(path):
                ours, found = blocks[i], path[i].blocks[group]
                if found == NULL_BLOCK and ours != NULL_BLOCK:
                    self._pool.index(ours, group, path[i])
                    lowest = min(lowest, i)
                elif stops and found != ours:
                    break
                i += 1
            table.indexed[group] = i
        for node in path[lowest:]:
            if len(node.above.sources) > 1:
                self._drop_what_it_covers(node)

    def partial_tail(self, table: BlockTable, tokens: TokenIds, chain: HashChain, num_computed: int) -> None:
        """Index the last, partly filled block, unless an entry holds its tokens and more. After `full_blocks`."""
        full, tip = len(table.path), table.tip
        rest = tokens[full * self._block_size : num_computed]
        if tip is None or not 0 < len(rest) < self._block_size:  # nothing, or a collision cut the path short
            return
        packed = pack_tokens(rest)
        if self._index.is_extended(tip, packed):
            return
        node = self._index.child(tip, block_hash(chain.start, tip.hash, packed), packed)
        if node is None:
            return
        for group, blocks in enumerate(table.groups):
            if node.blocks[group] == NULL_BLOCK:
                self._pool.index(blocks[full], group, node)
        self._drop_what_it_covers(node)

    def drop_if_covered(self, node: Node) -> None:
        """Free a partial entry that a longer sibling covers, unless it is in use."""
        if len(node.tokens) < self._block_size * TOKEN_BYTES and self._index.is_extended(node.above, node.tokens):
            self._drop(node)

    def _drop_what_it_covers(self, node: Node) -> None:
        if node.missing == 0:
            for sibling in self._index.shorter_siblings(node):
                self._drop(sibling)

    def _drop(self, node: Node) -> None:
        if node.missing == 0 and all(self._pool.ref_cnt(block) == 0 for block in node.blocks):
            for block in tuple(node.blocks):
                self._pool.drop(block)

    def _extend_path(self, table: BlockTable, chain: HashChain, full: int) -> None:
        """Nodes for the table's first `full` blocks, as far as no hash collides, and the pin on the last."""
        old, path = table.tip, table.path
        tip = old if old is not None else self._index.root(chain)
        while len(path) < full:
            node = self._index.child(tip, chain.hashes[len(path)], chain.packed[len(path)])
            if node is None:
                break
            path.append(node)
            tip = node
        if tip is not old:
            self._index.pin(tip)
            table.tip = tip
            if old is not None:
                self._index.unpin(old)
