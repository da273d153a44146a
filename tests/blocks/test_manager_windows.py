"""KVCacheManager with layers that see a window only."""

from __future__ import annotations

from anaphora.blocks.manager import KVCacheManager
from anaphora.types import NULL_BLOCK
from support.managers import match, run, start


def test_a_window_keeps_and_needs_only_what_it_sees() -> None:
    kv = KVCacheManager(64, 4, [None, 6])
    tokens = list(range(24))
    table, chain, _ = start(kv, tokens)
    kv.commit(table, tokens, chain, 24)
    kv.slide(table, 24)  # the query at 24 sees 19 .. 24
    full, windowed = table.groups
    assert NULL_BLOCK not in full
    assert [block == NULL_BLOCK for block in windowed] == [True] * 4 + [False] * 2
    kv.close(table, tokens, chain, 24)
    table, _ = kv.open(match(kv, tokens, max_tokens=20))
    assert [block == NULL_BLOCK for block in table.groups[1]] == [True] * 3 + [False] * 2
    assert kv.num_active == 7


def test_without_a_block_its_window_needs_a_prefix_is_shorter() -> None:
    kv = KVCacheManager(9, 2, [None, 2])
    run(kv, range(8))  # 4 + 4 blocks cached; the windowed ones went first
    table, chain, _ = start(kv, [99] * 4)  # takes the free block, and the windowed blocks 0, 1 and 2
    assert kv.evictions == 3
    assert match(kv, range(8)).num_tokens == 8  # sees 7 only
    assert match(kv, range(7)).num_tokens == 7  # runs into block 3, which is there
    assert match(kv, range(6)).num_tokens == 0  # would see 5, in block 2
    kv.close(table, [99] * 4, chain, 4)
    kv.check_invariants()


def test_a_windowed_request_outlives_a_pool_of_its_window() -> None:
    kv = KVCacheManager(3, 2, [3])
    tokens = list(range(100))
    table, chain, _ = start(kv, tokens[:2])
    for end in range(2, 101):
        kv.reserve(table, end)
        kv.commit(table, tokens, chain, end)
        kv.slide(table, end)
    kv.close(table, tokens, chain, 100)
    kv.check_invariants()
    assert match(kv, tokens).num_tokens == 100
