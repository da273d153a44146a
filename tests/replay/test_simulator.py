"""The replay is the server's cache: same hits as KVCacheManager, whatever the policy, block for block."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.blocks.eviction import LRU, POLICIES, make_policy
from anaphora.blocks.hashing import HashChain
from anaphora.blocks.manager import KVCacheManager
from anaphora.blocks.pool import Block
from anaphora.errors import InputError
from anaphora.replay.readers.base import TraceRequest
from anaphora.replay.simulator import PoolReplay, replay
from anaphora.types import BlockHash

KEY = b"k" * 32
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=40)
"""Sequences of one-token blocks, so that a block's name can be its whole prefix."""


def named(prompt: list[int]) -> list[BlockHash]:
    return [BlockHash(bytes(prompt[: i + 1])) for i in range(len(prompt))]


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None)
@given(prompts=PROMPTS, num_blocks=st.integers(8, 20))
def test_equals_the_cache_manager(name: str, prompts: list[list[int]], num_blocks: int) -> None:
    kv = KVCacheManager(num_blocks, 1, [None], make_policy(name))
    cache = PoolReplay(num_blocks, make_policy(name))
    for prompt in prompts:
        chain = HashChain(KEY, 1)
        match = kv.match_prefix(prompt, chain, len(prompt))
        table, _ = kv.open(match)
        kv.reserve(table, len(prompt))
        kv.close(table, prompt, chain, len(prompt))
        kv.check_invariants()
        assert cache.request(named(prompt)) == (match.num_tokens, 0)
        assert cache.pool.evictions == kv.evictions


class Watch:
    """What lies beyond the pool, and a witness of every eviction."""

    def __init__(self) -> None:
        self.stored: dict[BlockHash, int] = {}
        self.left: list[BlockHash] = []

    def fetch(self, missing: list[BlockHash]) -> int:
        count = 0
        while count < len(missing) and missing[count] in self.stored:
            count += 1
        return count

    def leave(self, block: Block) -> None:
        self.stored[block.hash] = block.depth
        self.left.append(block.hash)


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None)
@given(prompts=PROMPTS, num_blocks=st.integers(1, 12))
def test_no_policy_evicts_a_parent_before_its_cached_child(
    name: str, prompts: list[list[int]], num_blocks: int
) -> None:
    watch = Watch()
    cache = PoolReplay(num_blocks, make_policy(name), watch)  # type: ignore[arg-type]
    cached: set[BlockHash] = set()
    for prompt in prompts:
        names = named(prompt)
        cache.request(names)
        for gone in watch.left:
            cached.remove(gone)
            assert not any(other[:-1] == gone for other in cached)
        watch.left.clear()
        cached.update(names[:num_blocks])
        assert all(len(name) == 1 or name[:-1] in cached for name in cached)
        assert len(cached) == cache.pool.num_cached <= num_blocks
        assert all(watch.stored[name] == len(name) - 1 for name in watch.stored)


def test_what_left_the_pool_is_fetched_from_beyond() -> None:
    cache = PoolReplay(3, LRU(), Watch())  # type: ignore[arg-type]
    assert cache.request(named([0, 1, 2])) == (0, 0)
    assert cache.request(named([1, 1])) == (0, 0)
    assert cache.request(named([0, 1, 2, 3])) == (1, 2)


def test_a_prompt_longer_than_the_pool_keeps_its_head() -> None:
    cache = PoolReplay(3, LRU())
    assert cache.request(named([0] * 8)) == (0, 0)
    assert cache.request(named([0] * 8)) == (3, 0)


def test_counts_blocks_and_tokens() -> None:
    requests = [
        TraceRequest(0.0, 1100, hash_ids=[1, 2, 3], block_size=512),
        TraceRequest(1.0, 1100, hash_ids=[1, 2, 3], block_size=512),
        TraceRequest(2.0, 600, hash_ids=[1, 4], block_size=512),
        TraceRequest(3.0, 600, hash_ids=[1, 4], block_size=512, salt="tenant"),
    ]
    counts = replay(requests, 100, LRU())
    assert (counts.requests, counts.blocks, counts.hit_blocks, counts.evictions) == (4, 10, 4, 0)
    assert (counts.tokens, counts.hit_tokens) == (3400, 1100 + 512)
    assert counts.block_hit_rate == 0.4
    assert counts.token_hit_rate == 1612 / 3400


def test_token_ids_are_cut_into_full_blocks() -> None:
    requests = [TraceRequest(0.0, 9, token_ids=list(range(9))), TraceRequest(0.0, 6, token_ids=[*range(4), 9, 9])]
    counts = replay(requests, 100, LRU(), block_size=4)
    assert (counts.blocks, counts.hit_blocks, counts.hit_tokens) == (3, 1, 4)


def test_hash_ids_that_are_not_chained_are_refused() -> None:
    requests = [TraceRequest(0.0, 1024, hash_ids=ids, block_size=512) for ids in ([1, 2], [3, 2])]
    with pytest.raises(InputError, match="block 2 follows two different ones"):
        replay(requests, 10, LRU())


def test_an_empty_trace_has_no_hit_rate() -> None:
    counts = replay([], 10, LRU())
    assert (counts.block_hit_rate, counts.token_hit_rate) == (0.0, 0.0)
