"""One pass gives what the server's pool hits under LRU, at every size."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.blocks.eviction import LRU
from anaphora.replay.lru_curve import LRUCurve, lru_curve
from anaphora.replay.readers.base import TraceRequest
from anaphora.replay.simulator import PoolReplay, replay
from anaphora.replay.synthetic import GENERATORS
from anaphora.types import BlockHash

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=60)


def named(prompt: list[int]) -> list[BlockHash]:
    return [BlockHash(bytes(prompt[: i + 1])) for i in range(len(prompt))]


def hits_of_pool(prompts: list[list[int]], num_blocks: int) -> int:
    cache = PoolReplay(num_blocks, LRU())
    return sum(cache.request(named(prompt))[0] for prompt in prompts)


@settings(deadline=None)
@given(prompts=PROMPTS, limit=st.one_of(st.none(), st.integers(16, 40)))
def test_equals_the_pool_at_every_size(prompts: list[list[int]], limit: int | None) -> None:
    curve = LRUCurve(limit)
    for prompt in prompts:
        curve.request(named(prompt))
    rates = []
    for num_blocks in (1, 2, 3, 5, 8, 9, 13, 16):
        hits = hits_of_pool(prompts, num_blocks)
        assert curve.hits(num_blocks) == (hits, hits)
        rates.append(hits)
    assert rates == sorted(rates)  # a bigger cache never hits less


@pytest.mark.parametrize("name", ["chat", "agents", "zipf"])
def test_equals_the_pool_on_made_up_traffic(name: str) -> None:
    requests = list(GENERATORS[name](1500, 5))
    curve = lru_curve(requests, 2000)
    for num_blocks in (50, 400, 2000):
        counts = replay(requests, num_blocks, LRU())
        assert curve.hits(num_blocks) == (counts.hit_blocks, counts.hit_tokens)
    assert (curve.requests, curve.blocks, curve.tokens) == (counts.requests, counts.blocks, counts.tokens)


def test_the_ceiling_and_the_distances() -> None:
    curve = LRUCurve()
    for prompt in ("ab", "ac", "ab"):
        curve.request([prompt[: i + 1] for i in range(len(prompt))], 10, 15)
    # second prompt: a at distance 0; third: a at 0, b behind a and c; a last block has 5 tokens
    assert curve.distances() == [(0, 1, 2), (2, 3, 1)]
    assert curve.ceiling == (3, 25)
    assert [curve.hits(size) for size in (0, 1, 2, 3)] == [(0, 0), (2, 20), (2, 20), (3, 25)]


def test_memory_is_bounded_by_the_largest_pool_asked_for() -> None:
    curve = LRUCurve(300)
    for request in GENERATORS["scans"](3000, 1):
        curve.request(request.hash_ids or ())
        assert len(curve._owner) < 300 + 24
        assert len(curve._segments) <= 2 * 1025
    with pytest.raises(ValueError, match="up to 300"):
        curve.hits(301)


def test_equals_libcachesim_on_single_blocks() -> None:
    """Prompts of one block are flat keys: there the semantics are the same."""
    libcachesim: Any = pytest.importorskip("libcachesim", reason="libcachesim is not installed")
    keys = [request.hash_ids[0] for request in GENERATORS["zipf"](3000, 4) if request.hash_ids]
    curve = lru_curve([TraceRequest(0.0, 512, hash_ids=[key], block_size=512) for key in keys])
    for size in (10, 100, 1000):
        cache, hits = libcachesim.LRU(cache_size=size), 0
        for key in keys:
            item = libcachesim.Request()
            item.obj_id, item.obj_size = key + 1, 1
            hits += cache.get(item)
        assert curve.hits(size)[0] == hits


def test_the_distances_are_those_of_the_curve() -> None:
    curve = lru_curve(GENERATORS["chat"](400, 3))
    counted = sum((high - low) * level for low, high, level in curve.distances())
    assert counted == curve.ceiling[0]
    assert all(a[1] <= b[0] for a, b in pairwise(curve.distances()))
