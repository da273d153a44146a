"""KVCacheManager, one behaviour at a time, and against a naive search where nothing is evicted."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from anaphora.blocks import hashing, prefix_index, publishing
from anaphora.blocks.hashing import HashChain
from anaphora.blocks.manager import KVCacheManager, PrefixMatch
from anaphora.errors import BlockStateError, ConfigError, OutOfBlocks
from anaphora.types import BlockHash
from support.managers import KEY, OTHER_KEY, match, run, start


def test_reuse_is_to_the_token() -> None:
    kv = KVCacheManager(16, 4, [None])
    run(kv, range(11))
    assert match(kv, [*range(10), 99]).num_tokens == 10  # 2 blocks and 2 of the partial tail's 3 tokens
    assert match(kv, [*range(7), 99, 98]).num_tokens == 7  # 1 block and 3 of a full one
    assert match(kv, [*range(3), 99]).num_tokens == 3
    assert match(kv, range(11), max_tokens=10).num_tokens == 10
    assert match(kv, range(11), max_tokens=0) is PrefixMatch.EMPTY
    assert match(kv, [5, 6]).num_tokens == 0


def test_a_cap_inside_a_full_block_copies_from_it() -> None:
    kv = KVCacheManager(16, 4, [None])
    run(kv, range(8))
    found = match(kv, range(8), max_tokens=7)
    table, copies = kv.open(found)
    shared, fresh = table.groups[0]
    assert len(found.nodes) == 1
    assert [(copy.dst, copy.num_tokens) for copy in copies] == [(fresh, 3)]
    assert copies[0].src not in (shared, fresh)
    assert kv.num_active == 3
    kv.release_copies(copies)
    assert (kv.num_active, kv.num_cached) == (2, 1)


def test_matching_changes_nothing() -> None:
    kv = KVCacheManager(4, 2, [None])
    run(kv, [1, 2, 3, 4])
    run(kv, [5, 6, 7, 8])
    for _ in range(5):
        assert match(kv, [1, 2, 3, 4]).num_tokens == 4  # a hit that is not opened does not make it recent
    run(kv, [9, 9])
    assert match(kv, [1, 2, 3, 4]).num_tokens == 2
    assert match(kv, [5, 6, 7, 8]).num_tokens == 4


def test_eviction_takes_the_oldest_tail_first() -> None:
    kv = KVCacheManager(4, 2, [None])
    run(kv, [1, 2, 3, 4])
    run(kv, [5, 6, 7, 8])
    run(kv, [1, 2, 3, 4])  # recent again
    for expected in (2, 0):
        table, chain, _ = start(kv, [9])
        assert match(kv, [5, 6, 7, 8]).num_tokens == expected
        kv.reserve(table, 4)
        kv.close(table, [], chain, 0)
        assert match(kv, [1, 2, 3, 4]).num_tokens == 4
    assert kv.evictions == 2


def test_blocks_become_findable_when_full_and_computed() -> None:
    kv = KVCacheManager(16, 4, [None])
    tokens = list(range(12))
    table, chain, _ = start(kv, tokens)
    assert match(kv, tokens).num_tokens == 0
    kv.commit(table, tokens, chain, 7)
    assert match(kv, tokens).num_tokens == 4
    kv.commit(table, tokens, chain, 12)
    assert match(kv, tokens).num_tokens == 12
    kv.close(table, tokens, chain, 12)
    assert (kv.num_free, kv.num_active, kv.num_cached) == (13, 0, 3)


def test_what_two_requests_computed_at_once_is_kept_once() -> None:
    kv = KVCacheManager(16, 2, [None])
    first, second = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 8, 8, 8]
    one, one_chain, _ = start(kv, first)
    two, two_chain, _ = start(kv, second)
    kv.commit(one, first, one_chain, 7)
    kv.commit(two, second, two_chain, 7)
    kv.check_invariants()
    assert match(kv, second).num_tokens == 4  # the rest hangs below blocks that `two` does not hold
    kv.close(one, first, one_chain, 7)
    assert kv.num_cached == 4
    kv.close(two, second, two_chain, 7)
    kv.check_invariants()
    assert match(kv, second).num_tokens == 7
    assert kv.num_cached == 6  # two shared, two ends with their tails


def test_a_request_always_gets_the_blocks_that_are_not_held() -> None:
    """Its duplicates must not keep another's cached blocks from being evicted."""
    kv = KVCacheManager(6, 1, [None])
    one, one_chain, _ = start(kv, [1, 2])
    two, two_chain, _ = start(kv, [1, 2, 3])
    kv.commit(one, [1, 2], one_chain, 2)
    kv.commit(two, [1, 2, 3], two_chain, 3)
    kv.close(one, [1, 2], one_chain, 2)
    kv.reserve(two, 6)
    assert kv.num_active == 6
    kv.commit(two, [1, 2, 3, 4, 5, 6], two_chain, 6)
    kv.check_invariants()
    assert match(kv, [1, 2, 3, 4, 5, 6]).num_tokens == 6


def test_a_longer_sibling_replaces_partial_entries() -> None:
    kv = KVCacheManager(16, 4, [None])
    run(kv, [1, 2, 9])
    run(kv, [1])
    assert kv.num_cached == 1  # [1] is covered by [1, 2, 9]
    run(kv, [1, 2, 3, 4, 5])
    assert kv.num_cached == 3
    run(kv, [1, 2, 9, 9])
    assert kv.num_cached == 3  # [1, 2, 9] made way for the full block
    assert kv.evictions == 0
    assert match(kv, [1, 2, 9]).num_tokens == 3


def test_a_partial_entry_in_use_goes_when_its_copy_has_run() -> None:
    kv = KVCacheManager(16, 4, [None])
    run(kv, [1, 2])
    tokens = [1, 2, 3, 4]
    table, chain, copies = start(kv, tokens)
    kv.commit(table, tokens, chain, 4)
    assert kv.num_active == 2
    kv.release_copies(copies)
    assert (kv.num_active, kv.num_cached) == (1, 0)
    kv.check_invariants()


def test_a_partial_entry_that_lost_a_group_meanwhile_is_left_to_eviction() -> None:
    kv = KVCacheManager(5, 4, [None, None])
    run(kv, [1, 2])
    tokens = [1, 2, 3, 4]
    table, chain, copies = start(kv, tokens)
    kv.commit(table, tokens, chain, 4)
    kv.release_copies(copies[:1])
    other, other_chain, _ = start(kv, [9])  # evicts the first group's source
    assert kv.evictions == 1
    kv.close(other, [], other_chain, 0)
    kv.release_copies(copies[1:])
    kv.check_invariants()
    assert (kv.num_free, kv.num_active, kv.num_cached) == (2, 2, 1)


def test_open_takes_all_or_nothing() -> None:
    kv = KVCacheManager(4, 2, [None])
    run(kv, [1, 2, 3])
    holder, _, _ = start(kv, [7, 7, 7])
    found = match(kv, [1, 2, 3])
    with pytest.raises(OutOfBlocks):
        kv.open(found)  # one block and the source pinned: none is left for the copy
    assert (kv.num_free, kv.num_active, kv.num_cached) == (0, 2, 2)
    table, copies = kv.open(match(kv, [1, 2, 3], found.num_tokens // 2 * 2))
    assert copies == []
    kv.reserve(table, 3)  # evicts what would have been the source
    assert kv.num_active == 4
    with pytest.raises(OutOfBlocks):
        kv.reserve(holder, 5)
    assert len(holder.groups[0]) == 2
    kv.check_invariants()


def test_copies_of_a_closed_table_hold_their_sources_until_released() -> None:
    kv = KVCacheManager(4, 2, [None])
    run(kv, [1, 2, 3])
    tokens = [1, 2, 3, 4]
    table, chain, copies = start(kv, tokens)
    kv.close(table, tokens, chain, 3)  # the copy never ran: its block is not whole
    found = match(kv, [1, 2, 3])
    assert found.source is not None
    assert (found.num_tokens, found.source.blocks) == (3, [copies[0].src])
    assert (kv.num_active, kv.num_cached) == (1, 1)
    blocked, _ = kv.open(PrefixMatch.EMPTY)
    with pytest.raises(OutOfBlocks):
        kv.reserve(blocked, 6)  # the cached parent must outlive the pinned source
    kv.release_copies(copies)
    kv.reserve(blocked, 8)
    assert kv.num_active == 4
    kv.check_invariants()


def test_open_undoes_its_pins_when_a_pinned_source_keeps_the_last_block() -> None:
    kv = KVCacheManager(5, 2, [None])
    run(kv, [7, 8, 9])
    run(kv, [1, 2, 3])
    table, chain, copies = start(kv, [1, 2, 3])
    kv.close(table, [1, 2, 3], chain, 3)
    start(kv, [5])
    before = (kv.num_free, kv.num_active, kv.num_cached)
    with pytest.raises(OutOfBlocks):
        kv.open(match(kv, [7, 8, 9]))
    assert (kv.num_free, kv.num_active, kv.num_cached) == before == (0, 2, 3)
    kv.check_invariants()
    kv.release_copies(copies)
    kv.open(match(kv, [7, 8, 9]))
    assert kv.num_active == 4


def test_copies_are_released_once() -> None:
    kv = KVCacheManager(8, 2, [None])
    run(kv, [1, 2, 3])
    _, copies = kv.open(match(kv, [1, 2, 3]))
    kv.release_copies(copies)
    with pytest.raises(BlockStateError, match="no holder"):
        kv.release_copies(copies)


def test_a_match_is_good_until_the_next_change() -> None:
    for windows in ([None], [1]):
        kv = KVCacheManager(2, 2, windows)
        run(kv, [1, 2, 3, 4])
        found = match(kv, [1, 2, 3, 4])
        assert found.num_tokens == 4
        run(kv, [5, 6, 7, 8])
        with pytest.raises(BlockStateError, match="out of date"):
            kv.open(found)
        kv.check_invariants()


def test_a_closed_table_is_closed() -> None:
    kv = KVCacheManager(4, 2, [None])
    table, chain, _ = start(kv, [1, 2])
    kv.close(table, [1, 2], chain, 2)
    moves: list[Callable[[], object]] = [
        lambda: kv.close(table, [1, 2], chain, 2),
        lambda: kv.reserve(table, 2),
        lambda: kv.commit(table, [1, 2], chain, 2),
        lambda: kv.slide(table, 2),
    ]
    for move in moves:
        with pytest.raises(BlockStateError, match="closed"):
            move()


def test_callers_mistakes_are_noticed() -> None:
    kv = KVCacheManager(4, 2, [None])
    table, chain, _ = start(kv, [1, 2])
    with pytest.raises(BlockStateError, match="cannot be computed"):
        kv.commit(table, [1, 2, 3, 4], chain, 4)
    with pytest.raises(BlockStateError, match="3 tokens"):
        kv.match_prefix([1, 2], HashChain(KEY, 3), 2)
    impossible: list[tuple[int, int, list[int | None]]] = [
        (0, 2, [None]),
        (4, 0, [None]),
        (4, 2, []),
        (4, 2, [None, 0]),
    ]
    for sizes in impossible:
        with pytest.raises(ConfigError, match="at least 1"):
            KVCacheManager(*sizes)


def test_reset_forgets_what_is_cached_and_what_is_held() -> None:
    kv = KVCacheManager(16, 2, [None])
    run(kv, [1, 2, 3])
    assert kv.reset_prefix_cache()
    assert (kv.num_free, match(kv, [1, 2, 3]).num_tokens) == (16, 0)
    tokens = [1, 2, 3, 4, 5, 6]
    table, chain, _ = start(kv, tokens)
    kv.commit(table, tokens, chain, 4)
    assert not kv.reset_prefix_cache()
    kv.check_invariants()
    kv.commit(table, tokens, chain, 6)
    kv.close(table, tokens, chain, 6)
    assert (kv.num_free, match(kv, tokens).num_tokens) == (16, 0)
    run(kv, tokens)
    assert match(kv, tokens).num_tokens == 6


def test_without_caching_nothing_is_found() -> None:
    kv = KVCacheManager(16, 2, [None, 3], enable_prefix_caching=False)
    run(kv, [1, 2, 3, 4, 5])
    assert match(kv, [1, 2, 3]) is PrefixMatch.EMPTY
    assert (kv.num_free, kv.num_cached) == (16, 0)


def test_salts_do_not_see_each_other() -> None:
    kv = KVCacheManager(16, 2, [None])
    run(kv, [1, 2, 3])
    assert match(kv, [1, 2, 3], key=OTHER_KEY).num_tokens == 0
    run(kv, [1, 2, 3], key=OTHER_KEY)
    assert kv.num_cached == 4
    assert match(kv, [1, 2, 3]).num_tokens == match(kv, [1, 2, 3], key=OTHER_KEY).num_tokens == 3


@pytest.mark.parametrize("salted", [False, True])
def test_a_hash_collision_never_serves_wrong_tokens(monkeypatch: pytest.MonkeyPatch, salted: bool) -> None:
    """Every hash the same: whatever is found still agrees token for token, and in its namespace."""
    for module in (hashing, prefix_index, publishing):
        monkeypatch.setattr(module, "block_hash", lambda *_: BlockHash(b"0" * 16))
    kv = KVCacheManager(32, 2, [None])
    run(kv, [1, 2, 3, 4, 5])
    assert match(kv, [1, 2, 3, 4, 5]).num_tokens == 2  # the only entry such a hash leaves room for
    run(kv, [7, 8, 9])
    run(kv, [1, 2, 7])
    key = OTHER_KEY if salted else KEY
    assert match(kv, [7, 8, 9], key=key).num_tokens == 0
    assert match(kv, [3, 4], key=key).num_tokens == 0
    assert match(kv, [1, 9], key=key).num_tokens == (0 if salted else 1)
    kv.check_invariants()


SEQUENCES = st.lists(
    st.tuples(st.sampled_from([KEY, OTHER_KEY]), st.lists(st.integers(0, 2), min_size=1, max_size=20)),
    min_size=1,
    max_size=12,
)
WINDOWS = st.sampled_from([(None,), (4,), (None, 1), (None, 5), (None, None)])


@settings(deadline=None)
@given(SEQUENCES, st.integers(1, 8), WINDOWS, st.booleans(), st.integers(0, 3))
def test_with_room_for_all_it_equals_the_longest_common_prefix(
    sequences: list[tuple[bytes, list[int]]],
    block_size: int,
    windows: tuple[int | None, ...],
    at_once: bool,
    cap: int,
) -> None:
    """One after the other, or all running together: nothing closed is ever lost, whatever duplicates there were."""
    kv = KVCacheManager(1000, block_size, windows)
    if at_once:
        started = [(tokens, *start(kv, tokens, key)) for key, tokens in sequences]
        for tokens, table, chain, copies in started:
            kv.release_copies(copies)
            kv.commit(table, tokens, chain, len(tokens))
            kv.slide(table, len(tokens))
        kv.check_invariants()
        for tokens, table, chain, _ in started:
            kv.close(table, tokens, chain, len(tokens))
    for i, (key, tokens) in enumerate(sequences):
        seen = sequences if at_once else sequences[:i]
        longest = max((_common(tokens, other) for k, other in seen if k == key), default=0)
        assert match(kv, tokens, len(tokens) - cap, key).num_tokens == max(0, min(longest, len(tokens) - cap))
        if not at_once:
            run(kv, tokens, key)
    kv.check_invariants()
    assert kv.num_active == kv.evictions == 0


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
