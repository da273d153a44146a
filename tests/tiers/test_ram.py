"""The RAM tier: exact in bytes, leaves first, nothing visible before it is whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anaphora.blocks.eviction import LRU
from anaphora.errors import ConfigError
from anaphora.tiers.ram import ENTRY_BYTES, RamTier
from anaphora.tiers.store import BlockMeta, Outcome
from support.stored_blocks import OTHER_SPACE, SIZE, chain, key, payload, payloads, room

SLOT = SIZE + ENTRY_BYTES


def tier(blocks: int, *, keeps_orphans: bool = False) -> RamTier:
    return RamTier(blocks * SLOT + SLOT - 1, SIZE, LRU(), keeps_orphans=keeps_orphans)


def keys(blocks: list[BlockMeta]) -> list[bytes]:
    return [block.key for block in blocks]


def test_what_was_saved_is_loaded() -> None:
    ram, blocks, into = tier(8), chain("a", 5), room(5)
    assert ram.save(blocks, payloads(blocks)) == [Outcome.OK] * 5
    assert ram.contains([*keys(blocks), key("x")]) == [True] * 5 + [False]
    assert ram.load(blocks, into) == [Outcome.OK] * 5
    assert into == payloads(blocks)
    ram.check_invariants()
    stats = ram.stats()
    assert (stats.hits, stats.bytes_loaded, stats.used_bytes) == (5, 5 * SIZE, 5 * SLOT)


@pytest.mark.parametrize(
    "change",
    [{"tokens": b"\0" * 64}, {"parent": key("x")}, {"space": OTHER_SPACE}],
    ids=lambda change: next(iter(change)),
)
def test_the_same_key_for_another_block_is_a_miss(change: dict[str, bytes]) -> None:
    ram, block = tier(2), chain("a", 1)[0]
    ram.save([block], [payload(block)])
    assert ram.load([replace(block, **change)], room(1)) == [Outcome.MISS]  # type: ignore[arg-type]


def test_leaves_go_first_and_the_oldest_of_them() -> None:
    ram, old, new = tier(6), chain("old", 3), chain("new", 3)
    ram.save(old, payloads(old))
    ram.save(new, payloads(new))
    more = chain("more", 2)
    ram.save(more, payloads(more))
    assert ram.contains(keys(old)) == [True, False, False]
    assert ram.contains(keys(new + more)) == [True] * 5
    ram.check_invariants()


def test_a_chain_longer_than_the_tier_keeps_its_start() -> None:
    ram, blocks = tier(4), chain("long", 9)
    outcomes = ram.save(blocks, payloads(blocks))
    assert outcomes == [Outcome.OK] * 4 + [Outcome.DROPPED] * 5
    assert ram.contains(keys(blocks)) == [True] * 4 + [False] * 5


def test_leaves_that_come_before_their_parents_make_way_for_them() -> None:
    ram, blocks = tier(4, keeps_orphans=True), chain("long", 9)
    backwards = blocks[::-1]
    assert ram.save(backwards, payloads(backwards)) == [Outcome.OK] * 9
    assert ram.contains(keys(blocks)) == [True] * 4 + [False] * 5
    ram.check_invariants()


def test_borrowed_bytes_stay_until_they_are_given_back() -> None:
    ram, first = tier(2), chain("a", 1)[0]
    ram.save([first], [payload(first)])
    held = ram.borrow(first)
    assert held is not None
    entry, view = held
    ram.discard([first.key])
    for name in range(5):
        other = chain(name, 1)
        ram.save(other, payloads(other))
    assert view == payload(first)
    ram.give_back(entry)
    ram.check_invariants()
    assert ram.borrow(first) is None


def test_a_reserved_slot_is_invisible_until_published() -> None:
    ram, block = tier(1), chain("a", 1)[0]
    reserved = ram.reserve(block)
    assert reserved is not None
    assert ram.contains([block.key]) == [False]
    other = chain("b", 1)
    assert ram.save(other, payloads(other)) == [Outcome.DROPPED]
    reserved[1][:] = payload(block)
    ram.publish(reserved[0], block)
    assert ram.load([block], into := room(1)) == [Outcome.OK]
    assert into == [payload(block)]


def test_a_block_of_another_size_is_refused() -> None:
    ram, block = tier(2), chain("a", 1)[0]
    assert ram.save([block], [payload(block, SIZE - 1)]) == [Outcome.DROPPED]
    ram.save([block], [payload(block)])
    assert ram.load([block], room(1, SIZE // 2)) == [Outcome.MISS]


def test_a_limit_below_one_block_is_said() -> None:
    with pytest.raises(ConfigError, match="--ram-cache"):
        RamTier(SLOT - 1, SIZE, LRU())
