"""A policy orders exactly the candidates it was given."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.blocks.eviction import LRU


@dataclass(eq=False)
class Entry:
    last_used: int


def test_lru_takes_the_least_recently_used() -> None:
    policy: LRU[Entry] = LRU()
    entries = [Entry(when) for when in (5, 1, 3)]
    for entry in entries:
        policy.add(entry)
    assert [policy.pop().last_used for _ in entries] == [1, 3, 5]
    with pytest.raises(IndexError):
        policy.pop()


def test_removing_what_is_no_candidate_is_an_error() -> None:
    policy: LRU[Entry] = LRU()
    with pytest.raises(KeyError):
        policy.remove(Entry(1))


def test_a_removed_entry_comes_back_with_its_new_priority() -> None:
    policy: LRU[Entry] = LRU()
    first, second = Entry(1), Entry(2)
    policy.add(first)
    policy.add(second)
    policy.remove(first)
    first.last_used = 3
    policy.add(first)
    assert [policy.pop(), policy.pop()] == [second, first]


def test_reuse_without_eviction_does_not_grow_the_heap() -> None:
    policy: LRU[Entry] = LRU()
    entries = [Entry(0) for _ in range(10)]
    for when in range(1000):
        entry = entries[when % 10]
        if when >= 10:
            policy.remove(entry)
        entry.last_used = when
        policy.add(entry)
    assert len(policy) == 10
    assert len(policy._candidates._heap) < 100
    assert [policy.pop() for _ in entries] == entries


@given(st.lists(st.one_of(st.tuples(st.just("add"), st.integers(0, 9)), st.just(("remove", 0)), st.just(("pop", 0)))))
def test_equals_a_sorted_list(moves: list[tuple[str, int]]) -> None:
    policy: LRU[Entry] = LRU()
    model: list[Entry] = []
    for move, value in moves:
        if move == "add":
            model.append(Entry(value))
            policy.add(model[-1])
        elif model and move == "remove":
            policy.remove(model.pop(len(model) // 2))
        elif model:
            expected = min(model, key=lambda entry: entry.last_used)  # the earliest added among equals
            assert policy.pop() is expected
            model.remove(expected)
        assert len(policy) == len(model)
