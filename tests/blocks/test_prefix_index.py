"""The sorted children answer as a scan of all of them would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anaphora.blocks.hashing import TOKEN_BYTES, HashChain, block_hash, pack_tokens
from anaphora.blocks.prefix_index import Node, PrefixIndex
from anaphora.types import BlockId

# Ids whose little-endian bytes agree in part and sort unlike the numbers.
TOKEN = st.sampled_from([0, 1, 2, 256, 257, 2**16, 2**32 - 1])
BLOCK = st.lists(TOKEN, min_size=1, max_size=4)
CHAIN = HashChain(b"k" * 32, 4)


def add_child(index: PrefixIndex, parent: Node, tokens: list[int]) -> Node:
    packed = pack_tokens(tokens)
    node = index.child(parent, block_hash(CHAIN.start, parent.hash, packed), packed)
    assert node is not None
    return node


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.lists(BLOCK, min_size=1, max_size=12, unique_by=tuple), BLOCK)
def test_children_by_bisection_equal_children_by_scan(children: list[list[int]], query: list[int]) -> None:
    index = PrefixIndex(1)
    root = index.root(CHAIN)
    nodes = [add_child(index, root, tokens) for tokens in children]
    for i, node in enumerate(nodes):
        index.attach(node, 0, BlockId(i))
    index.check_invariants()

    found, run = index.longest_run(root, pack_tokens(query))
    assert run == max((common(tokens, query) for tokens in children), default=0)
    assert (found is None) == (run == 0)
    if found is not None:
        assert common(children[nodes.index(found)], query) == run
    longer = [tokens for tokens in children if len(tokens) > len(query) and tokens[: len(query)] == query]
    assert index.is_extended(root, pack_tokens(query)) == bool(longer)
    for node, tokens in zip(nodes, children, strict=True):
        shorter = [c for c in children if len(c) < len(tokens) and tokens[: len(c)] == c]
        assert [len(s.tokens) // TOKEN_BYTES for s in index.shorter_siblings(node)] == sorted(map(len, shorter))[::-1]

    for node in nodes:
        index.detach(node, 0)
    assert len(index) == 0
    assert index.find_root(CHAIN) is None


def test_a_child_missing_in_one_group_is_no_copy_source() -> None:
    index = PrefixIndex(2)
    root = index.root(CHAIN)
    node = add_child(index, root, [1, 2])
    index.attach(node, 0, BlockId(0))
    assert index.longest_run(root, pack_tokens([1, 2])) == (None, 0)
    index.attach(node, 1, BlockId(1))
    assert index.longest_run(root, pack_tokens([1, 3])) == (node, 1)
    index.detach(node, 0)
    assert index.longest_run(root, pack_tokens([1, 2])) == (None, 0)


def test_pins_keep_links_and_let_go_of_them() -> None:
    index = PrefixIndex(1)
    node = index.root(CHAIN)
    for token in range(3):
        node = add_child(index, node, [token])
    index.pin(node)
    index.check_invariants()
    assert len(index) == 3
    index.unpin(node)
    assert len(index) == 0
    assert index.find_root(CHAIN) is None


def test_walk_compares_tokens_and_parents_not_only_hashes() -> None:
    chain = HashChain(b"k" * 32, 2)
    chain.extend([1, 2, 3, 4])
    index = PrefixIndex(1)
    root = index.root(chain)
    first = index.child(root, chain.hashes[0], chain.packed[0])
    assert first is not None
    assert index.child(first, chain.hashes[1], chain.packed[1]) is not None
    assert len(index.walk(root, chain, 2)) == 2
    assert len(index.walk(root, chain, 1)) == 1
    chain.packed[1] = pack_tokens([3, 5])  # the same hash, other tokens
    assert len(index.walk(root, chain, 2)) == 1
    assert index.child(first, chain.hashes[1], chain.packed[1]) is None
    assert index.child(root, chain.hashes[1], pack_tokens([3, 4])) is None  # the same tokens, another parent
