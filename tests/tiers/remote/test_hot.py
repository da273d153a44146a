"""Counting reads in fixed memory: what is hot, what is not, and what was."""

from __future__ import annotations

import os
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from anaphora.tiers.remote.hot import HotKeys
from anaphora.tiers.store import group_key
from anaphora.types import BlockHash


def test_a_key_is_hot_from_its_threshold_on() -> None:
    hot = HotKeys(threshold=3)
    key, other = os.urandom(16), os.urandom(16)
    assert [hot.count([key])[0] for _ in range(4)] == [False, False, True, True]
    assert hot.count([other, key]) == [False, True]


@given(st.lists(st.integers(0, 40), max_size=300))
def test_it_never_counts_too_few(draws: list[int]) -> None:
    hot = HotKeys(threshold=5)
    seen: Counter[int] = Counter()
    for draw in draws:
        seen[draw] += 1
        answer = hot.count([draw.to_bytes(16, "little")])[0]
        assert answer or seen[draw] < 5


def test_many_cold_keys_stay_cold() -> None:
    hot = HotKeys(threshold=3)
    assert sum(hot.count([os.urandom(16) for _ in range(30_000)])) < 30


def test_cache_groups_of_one_prefix_are_counted_apart() -> None:
    hot = HotKeys(threshold=3)
    prefix = BlockHash(os.urandom(16))
    assert not any(hot.count([group_key(prefix, group) for group in range(200)]))


def test_old_fame_fades() -> None:
    hot = HotKeys(threshold=4, window=1000)
    key = os.urandom(16)
    assert hot.count([key] * 8)[-1]
    for _ in range(4):
        hot.count([os.urandom(16) for _ in range(1000)])
    assert not hot.count([key])[0]


def test_counts_end_at_the_top() -> None:
    hot = HotKeys(threshold=255)
    assert all(hot.count([bytes(16)] * 1000)[254:])
