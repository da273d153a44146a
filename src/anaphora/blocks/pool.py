"""BlockPool: the one owner of every block's state.

            allocate                     release (last holder)
    free ------------> active ---------------------------------------> free      nothing indexed
     ^                   |  ^  \\
     |                   |  |   `- index: its content becomes findable
     |   evict, drop     |  | acquire
     `------------------ cached <--- release (last holder, indexed)

In a full-attention group a cached block is evicted only after all its cached children (prefix closure): a
child is of no use without its parents. A windowed group has no such tie: a child needs only what its window
covers, and the blocks a window has passed must be free to go while the request runs on.

Pinned blocks go last (eviction/pins.py); the policy orders the rest, and hears of every insert, hit and loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from anaphora.blocks.eviction import EvictionPolicy, Pins
from anaphora.blocks.prefix_index import Node, PrefixIndex
from anaphora.errors import BlockStateError, OutOfBlocks
from anaphora.types import NULL_BLOCK, BlockHash, BlockId


class Block:
    """State of one block. Written by BlockPool only."""

    __slots__ = ("group", "id", "kids", "last_used", "node", "ref_cnt")

    def __init__(self, block_id: BlockId) -> None:
        self.id = block_id
        self.ref_cnt = 0
        self.node: Node | None = None
        """What it holds, once findable; `group` says for which cache group."""
        self.group = 0
        self.kids = 0
        """Indexed children that tie it (full-attention groups only)."""
        self.last_used = 0
        """Logical time of the last release."""

    @property
    def hash(self) -> BlockHash:
        """Of a findable block: the identity of its content."""
        assert self.node is not None
        return self.node.hash

    @property
    def depth(self) -> int:
        """Of a findable block: blocks before it in its sequence."""
        assert self.node is not None
        return self.node.depth


class BlockPool:
    """`num_blocks` blocks, their states, and the index of those that can be found.

    closed[g] says whether prefix closure holds in cache group g (full attention). `max_pinned` blocks may be
    pinned at a time; `clock` gives the seconds that pins are measured in.
    """

    def __init__(
        self,
        num_blocks: int,
        closed: Sequence[bool],
        policy: EvictionPolicy[Block],
        max_pinned: int = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.prefixes = PrefixIndex(len(closed))
        self.num_active = 0
        self.num_cached = 0
        self.evictions = 0
        """Cached blocks whose content was given up to make room."""
        self._closed = tuple(closed)
        self._policy = policy
        self._pins: Pins[Block] = Pins(max_pinned, clock)
        self.evict_listeners: list[Callable[[Block], object]] = []
        """Hear of every block that is evicted while it can still be read, together with what it is indexed as."""
        self._blocks = [Block(BlockId(i)) for i in range(num_blocks)]
        self._free = [block.id for block in reversed(self._blocks)]
        self._clock = 0

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_pinned(self) -> int:
        """Blocks under a pin that has not run out, as far as anyone looked."""
        return len(self._pins)

    def ref_cnt(self, block_id: BlockId) -> int:
        return self._blocks[block_id].ref_cnt

    def node(self, block_id: BlockId) -> Node | None:
        """What the block is indexed as, if it is."""
        return self._blocks[block_id].node

    def allocate(self, count: int) -> list[BlockId]:
        """Free blocks become active (ref_cnt 1), after evicting cached ones as needed.

        Raises OutOfBlocks: no block became active. (Cached blocks may be gone in the one case that an active
        block hangs below a cached one: a copy source of a table that was closed before its copies ran.)
        """
        if count > len(self._free) + self.num_cached:
            raise self.out_of_blocks(count)
        if len(self._free) < count:
            self._let_expired_go()
            while len(self._free) < count:
                self._evict_one(count)
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._blocks[block_id].ref_cnt = 1
        self.num_active += count
        return taken

    def acquire(self, block_id: BlockId) -> None:
        """One more holder of an active or cached block. Raises BlockStateError for a free one."""
        block = self._blocks[block_id]
        if block.ref_cnt == 0:
            if block.node is None:
                raise BlockStateError(f"block {block_id} is free and cannot be acquired")
            if block.kids == 0:
                self._withdraw(block)
            self.num_cached -= 1
            self.num_active += 1
        block.ref_cnt += 1
        if block.node is not None:
            self._policy.hit(block)

    def hold(self, block_id: BlockId) -> None:
        """One more holder of an active block, who reads it only once: no hit. `release` as ever."""
        block = self._blocks[block_id]
        if block.ref_cnt == 0:
            raise BlockStateError(f"block {block_id} has no holder; acquire it instead")
        block.ref_cnt += 1

    def release(self, block_id: BlockId) -> None:
        """One holder less; the last one leaves the block cached when it is findable, else free."""
        block = self._blocks[block_id]
        if block.ref_cnt == 0:
            raise BlockStateError(f"block {block_id} has no holder and cannot be released")
        block.ref_cnt -= 1
        if block.ref_cnt:
            return
        self.num_active -= 1
        if block.node is None:
            self._free.append(block_id)
            return
        self._clock += 1
        block.last_used = self._clock
        self.num_cached += 1
        if block.kids == 0:
            self._offer(block)

    def index(self, block_id: BlockId, group: int, node: Node) -> None:
        """The active block's content becomes findable as group `group` of `node`.

        Raises BlockStateError when the block is not active or already indexed, the node has a block there,
        or the parent's is missing where prefix closure holds.
        """
        block = self._blocks[block_id]
        if block.ref_cnt == 0 or block.node is not None:
            raise BlockStateError(f"block {block_id} is not active, or already indexed")
        if node.blocks[group] != NULL_BLOCK:
            raise BlockStateError(f"block {block_id} holds what block {node.blocks[group]} is already indexed for")
        if (tied := self._tied_parent(node, group)) is not None:
            if tied.kids == 0 and tied.ref_cnt == 0:
                self._withdraw(tied)
            tied.kids += 1
        block.node, block.group = node, group
        self.prefixes.attach(node, group, block_id)
        above = node.above.blocks[group]
        self._policy.insert(block, self._blocks[above] if above != NULL_BLOCK else None)

    def pin(self, block_id: BlockId, seconds: float) -> bool:
        """Keep a findable block longer than any unpinned one; False when `max_pinned` blocks are pinned already.

        A pin lasts `seconds` from now, or as long as it did when that is longer; a child's needs its parent's.
        """
        self._let_expired_go()
        block = self._blocks[block_id]
        if block.node is None:
            raise BlockStateError(f"block {block_id} is not findable and cannot be pinned")
        free_to_go = block.ref_cnt == 0 and block.kids == 0
        if free_to_go:
            self._withdraw(block)
        pinned = self._pins.pin(block, seconds)
        if free_to_go:
            self._offer(block)
        return pinned

    def drop(self, block_id: BlockId) -> None:
        """A cached block that no cached child needs becomes free; its content is lost."""
        block = self._blocks[block_id]
        if block.ref_cnt or block.node is None or block.kids:
            raise BlockStateError(f"block {block_id} is in use, free, or needed by a cached child; cannot be dropped")
        self._withdraw(block)
        self._policy.forget(block)
        self._unindex(block)

    def reset(self) -> bool:
        """Nothing is findable any more: cached blocks become free, active ones stay with their holders.

        Returns whether no indexed block was active.
        """
        idle = True
        for block in self._blocks:
            if block.node is None:
                continue
            if block.ref_cnt:
                idle = False
            else:
                if block.kids == 0:
                    self._withdraw(block)
                self._free.append(block.id)
            self._policy.forget(block)
            self._pins.forget(block)
            block.node.blocks[block.group] = NULL_BLOCK
            block.node, block.kids = None, 0
        self.num_cached = 0
        self.prefixes.clear()
        return idle

    def out_of_blocks(self, count: int) -> OutOfBlocks:
        return OutOfBlocks(
            f"{count} blocks are wanted, {self.num_free} are free and {self.num_cached} cached of "
            f"{self.num_blocks}; close or preempt a request, or give the pool more memory"
        )

    def _tied_parent(self, node: Node, group: int) -> Block | None:
        """The block that must outlive the node's in this group, if any."""
        if not self._closed[group] or (above := node.above).parent is None:
            return None
        parent = above.blocks[group]
        if parent == NULL_BLOCK:
            raise BlockStateError(f"group {group} has no block for the parent: prefix closure is broken")
        return self._blocks[parent]

    def _offer(self, block: Block) -> None:
        """The block may be evicted from now on."""
        if block in self._pins:
            self._pins.add(block)
        else:
            self._policy.add(block)

    def _withdraw(self, block: Block) -> None:
        if block in self._pins:
            self._pins.remove(block)
        else:
            self._policy.remove(block)

    def _let_expired_go(self) -> None:
        for block in self._pins.expire():
            self._policy.add(block)

    def _evict_one(self, wanted: int) -> None:
        """Raises OutOfBlocks when no cached block may go."""
        if len(self._policy):
            block = self._policy.pop()
        elif self._pins.num_candidates:
            block = self._pins.pop()
            self._policy.forget(block)
        else:
            raise self.out_of_blocks(wanted)
        for listener in self.evict_listeners:
            listener(block)
        self._unindex(block)
        self.evictions += 1

    def _unindex(self, block: Block) -> None:
        """Cached -> free. The block is out of the policy already."""
        self._pins.forget(block)
        node = block.node
        assert node is not None
        parent = self._tied_parent(node, block.group)
        self.prefixes.detach(node, block.group)
        block.node = None
        self.num_cached -= 1
        self._free.append(block.id)
        if parent is not None:
            parent.kids -= 1
            if parent.kids == 0 and parent.ref_cnt == 0:
                self._offer(parent)

    def check_invariants(self) -> None:
        """Raises BlockStateError when a block's state, the counts, the index and the policy disagree. O(pool)."""
        self.prefixes.check_invariants()
        free = set(self._free)
        active = {b.id for b in self._blocks if b.ref_cnt > 0}
        cached = {b.id for b in self._blocks if b.ref_cnt == 0 and b.node is not None}
        if len(free) != len(self._free) or free & (active | cached):
            raise BlockStateError("the free list holds a block twice, or one that is in use")
        if (len(active), len(cached)) != (self.num_active, self.num_cached):
            raise BlockStateError(f"{len(active)} active, {len(cached)} cached, counted otherwise")
        if len(free) + len(active) + len(cached) != self.num_blocks:
            raise BlockStateError("free + active + cached is not the number of blocks")
        kids = [0] * self.num_blocks
        indexed = 0
        for block in self._blocks:
            if block.ref_cnt < 0:
                raise BlockStateError(f"block {block.id} has ref_cnt {block.ref_cnt}")
            if block.node is None:
                continue
            indexed += 1
            if block.node not in self.prefixes or block.node.blocks[block.group] != block.id:
                raise BlockStateError(f"block {block.id} says it is indexed, the index does not agree")
            if (parent := self._tied_parent(block.node, block.group)) is not None:
                kids[parent.id] += 1
        if indexed != self.prefixes.num_entries:
            raise BlockStateError("an index entry points to a block that holds something else")
        if kids != [block.kids for block in self._blocks]:
            raise BlockStateError("the counts of cached children are wrong")
        if len(self._policy) + self._pins.num_candidates != sum(not self._blocks[i].kids for i in cached):
            raise BlockStateError("the eviction policy's candidates are not the cached leaves")
