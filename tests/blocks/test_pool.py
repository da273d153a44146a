"""Only legal moves, prefix closure whatever the policy, and checks that notice what is broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anaphora.blocks.eviction import LRU, PriorityPolicy
from anaphora.blocks.hashing import HashChain
from anaphora.blocks.pool import Block, BlockPool
from anaphora.blocks.prefix_index import Node
from anaphora.errors import BlockStateError, OutOfBlocks
from anaphora.types import BlockId

KEY = b"k" * 32


class ParentsFirst(PriorityPolicy[Block]):
    """Wants to break prefix closure."""

    def priority(self, entry: Block) -> float:
        return entry.id


def pool_with_chain(num_blocks: int, length: int, closed: bool = True) -> tuple[BlockPool, list[BlockId], list[Node]]:
    """A pool whose first `length` blocks are one cached sequence of one-token blocks."""
    pool = BlockPool(num_blocks, [closed], ParentsFirst())
    chain = HashChain(KEY, 1)
    chain.extend(list(range(length)))
    blocks, nodes = pool.allocate(length), []
    node = pool.prefixes.root(chain)
    for block, digest, packed in zip(blocks, chain.hashes, chain.packed, strict=True):
        child = pool.prefixes.child(node, digest, packed)
        assert child is not None
        pool.index(block, 0, child)
        nodes.append(child)
        node = child
    for block in reversed(blocks):
        pool.release(block)
    pool.check_invariants()
    return pool, blocks, nodes


def test_blocks_move_free_active_free() -> None:
    pool = BlockPool(4, [True], LRU())
    first, second = pool.allocate(2)
    pool.acquire(first)
    pool.release(first)
    assert (pool.num_free, pool.num_active, pool.num_cached) == (2, 2, 0)
    pool.release(first)
    pool.release(second)
    assert (pool.num_free, pool.num_active, pool.num_cached) == (4, 0, 0)
    pool.check_invariants()


def test_leaves_go_first_whatever_the_policy_wants() -> None:
    pool, blocks, _ = pool_with_chain(4, 4)
    taken = [pool.allocate(1)[0] for _ in blocks]
    assert taken == blocks[::-1]
    assert pool.evictions == 4
    assert len(pool.prefixes) == 0


def test_a_windowed_group_has_no_ties() -> None:
    pool, blocks, nodes = pool_with_chain(4, 4, closed=False)
    assert pool.allocate(2) == blocks[:2][::-1]
    pool.check_invariants()
    assert nodes[0] in pool.prefixes  # a link for those below
    pool.allocate(2)
    assert len(pool.prefixes) == 0


def test_parents_of_an_active_child_stay() -> None:
    pool, blocks, _ = pool_with_chain(4, 3)
    for block in blocks:
        pool.acquire(block)
    with pytest.raises(OutOfBlocks, match="2 blocks are wanted, 1 are free and 0 cached of 4"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.release(blocks[2])
    pool.allocate(2)
    assert [pool.ref_cnt(block) for block in blocks] == [1, 1, 1]
    pool.check_invariants()


def test_illegal_moves() -> None:
    pool, blocks, nodes = pool_with_chain(4, 2)
    assert blocks == [0, 1]
    active = pool.allocate(1)[0]
    moves: list[Callable[[], object]] = [
        lambda: pool.acquire(BlockId(3)),
        lambda: pool.release(BlockId(3)),
        lambda: pool.release(blocks[0]),
        lambda: pool.index(blocks[0], 0, nodes[0]),  # cached
        lambda: pool.index(active, 0, nodes[1]),  # already stands for another block
        lambda: pool.drop(active),
        lambda: pool.drop(blocks[0]),  # its child needs it
        lambda: pool.drop(BlockId(3)),
    ]
    for move in moves:
        with pytest.raises(BlockStateError):
            move()
    pool.check_invariants()
    pool.drop(blocks[1])
    pool.drop(blocks[0])
    assert (pool.num_free, pool.num_cached, pool.evictions) == (3, 0, 0)
    pool.check_invariants()


def test_a_child_cannot_be_indexed_without_its_parent() -> None:
    pool = BlockPool(2, [True], LRU())
    chain = HashChain(KEY, 1)
    chain.extend([1, 2])
    above = pool.prefixes.child(pool.prefixes.root(chain), chain.hashes[0], chain.packed[0])
    assert above is not None
    below = pool.prefixes.child(above, chain.hashes[1], chain.packed[1])
    assert below is not None
    with pytest.raises(BlockStateError, match="prefix closure"):
        pool.index(pool.allocate(1)[0], 0, below)


def test_reset_frees_the_cached_and_keeps_the_active() -> None:
    pool, blocks, _ = pool_with_chain(4, 3)
    pool.acquire(blocks[0])
    assert not pool.reset()
    assert (pool.num_free, pool.num_active, pool.num_cached) == (3, 1, 0)
    pool.check_invariants()
    pool.release(blocks[0])
    assert pool.num_free == 4
    assert pool.reset()


def lose_a_block(pool: BlockPool) -> None:
    pool._free.pop()


def double_a_free_block(pool: BlockPool) -> None:
    pool._free[0] = pool._free[1]


def forget_a_kid(pool: BlockPool) -> None:
    pool._blocks[0].kids = 0


def forget_a_candidate(pool: BlockPool) -> None:
    pool._policy.pop()


def swap_two_entries(pool: BlockPool) -> None:
    a, b = pool._blocks[0].node, pool._blocks[1].node
    assert a is not None
    assert b is not None
    a.blocks, b.blocks = b.blocks, a.blocks


def change_tokens(pool: BlockPool) -> None:
    node = pool._blocks[1].node
    assert node is not None
    node.tokens = b"\7\0\0\0"


def leak_a_pin(pool: BlockPool) -> None:
    node = pool._blocks[1].node
    assert node is not None
    node.refs += 1


def leave_an_entry_behind(pool: BlockPool) -> None:
    block = pool._blocks[1]
    block.node = None
    pool._blocks[0].kids = 0
    pool._free.append(block.id)
    pool.num_cached -= 1


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_block,
        double_a_free_block,
        forget_a_kid,
        forget_a_candidate,
        swap_two_entries,
        change_tokens,
        leak_a_pin,
        leave_an_entry_behind,
    ],
)
def test_check_invariants_notices(damage: Callable[[BlockPool], None]) -> None:
    pool, _, _ = pool_with_chain(4, 2)
    damage(pool)
    with pytest.raises(BlockStateError):
        pool.check_invariants()
