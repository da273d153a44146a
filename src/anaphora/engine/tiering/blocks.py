"""The pool's blocks as the tiers see them: contiguous bytes, and which tokens they hold."""

from __future__ import annotations

from anaphora.blocks.hashing import HashChain
from anaphora.blocks.pool import Block
from anaphora.blocks.prefix_index import Node
from anaphora.tiers.store import BlockMeta, Space, group_key
from anaphora.types import BlockHash, BlockId


class PoolBlocks:
    """Names and views; changes nothing."""

    def __init__(self, memory: memoryview, block_bytes: int, space: Space) -> None:
        """`memory`: all blocks, one after the other."""
        self.memory = memory
        self.block_bytes = block_bytes
        self._space = space

    def view(self, block: BlockId) -> memoryview:
        return self.memory[block * self.block_bytes : (block + 1) * self.block_bytes]

    def meta(self, chain: HashChain, index: int, group: int) -> BlockMeta:
        """Of block `index` of a sequence, in a cache group."""
        parent = chain.hashes[index - 1] if index else BlockHash(chain.root)
        return BlockMeta(
            group_key(chain.hashes[index], group),
            group_key(parent, group),
            chain.packed[index],
            index,
            self._space,
        )

    def meta_of(self, block: Block, node: Node) -> BlockMeta:
        """Of a block that is findable as `node`."""
        above = node.above
        return BlockMeta(
            group_key(node.hash, block.group),
            group_key(above.hash, block.group),
            node.tokens,
            node.depth,
            self._space,
        )
