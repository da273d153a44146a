"""The hierarchy: finding, loading, promoting, saving, with real tiers and a shared store in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from anaphora.blocks.eviction import LRU
from anaphora.tiers.break_even import LoadSpeed
from anaphora.tiers.disk import DiskTier
from anaphora.tiers.hierarchy import Hierarchy, Tier
from anaphora.tiers.ram import ENTRY_BYTES, RamTier
from anaphora.tiers.remote.tier import RemoteTier
from anaphora.tiers.saving import WritePolicy
from anaphora.tiers.store import BlockMeta, Outcome
from anaphora.tiers.transfers import NOWHERE, Load, Save
from support.shared_store import Shared
from support.stored_blocks import SIZE, chain, payload, payloads, room

SPEED = LoadSpeed(0.0, 1e9)


class House:
    """A hierarchy and its parts."""

    def __init__(self, folder: Path, shared: Shared | None, kinds: str, policy: WritePolicy, ram_blocks: int) -> None:
        self.news = threading.Event()
        self.ram: RamTier | None = None
        self.disk: DiskTier | None = None
        tiers: list[Tier] = []
        orphans = policy is WritePolicy.ON_EVICTION
        if "ram" in kinds:
            self.ram = RamTier(ram_blocks * (SIZE + ENTRY_BYTES), SIZE, LRU(), keeps_orphans=orphans)
            tiers.append(Tier(self.ram, 1, SPEED))
        if "disk" in kinds:
            self.disk = DiskTier(folder, 4 << 20, LRU(), keeps_orphans=orphans)
            tiers.append(Tier(self.disk, 2, SPEED))
        if "remote" in kinds:
            remote = RemoteTier(shared or Shared())
            tiers.append(Tier(remote, 2, SPEED, remote.keep_locally))
        self.tiers = Hierarchy(tiers, policy, self.news.set)

    def wait(self, transfer: Load | Save) -> None:
        """As the engine does: poll until it comes."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            self.news.clear()
            if transfer in self.tiers.poll():
                assert transfer.done
                return
            self.news.wait(0.2)
        raise AssertionError("the transfer never came back")

    def save(self, blocks: list[BlockMeta]) -> None:
        save = self.tiers.computed(blocks, payloads(blocks))
        assert save is not None
        self.wait(save)
        assert self.tiers.drain(20)

    def load(self, blocks: list[BlockMeta]) -> Load:
        """Load them all; what is OK is right."""
        found = self.tiers.lookup([block.key for block in blocks])
        end = time.monotonic() + 20
        while not found.done and time.monotonic() < end:
            self.news.wait(0.05)
        assert found.done
        load = self.tiers.load(blocks, into := room(len(blocks)), found.places)
        self.wait(load)
        for block, outcome, view in zip(blocks, load.outcomes, into, strict=True):
            assert outcome is not None
            assert outcome is not Outcome.OK or view == payload(block)
        return load


class Build(Protocol):
    def __call__(
        self,
        kinds: str,
        shared: Shared | None = None,
        policy: WritePolicy = WritePolicy.THROUGH,
        ram_blocks: int = 64,
    ) -> House: ...


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    built: list[House] = []

    def make(
        kinds: str,
        shared: Shared | None = None,
        policy: WritePolicy = WritePolicy.THROUGH,
        ram_blocks: int = 64,
    ) -> House:
        built.append(House(tmp_path / f"disk{len(built)}", shared, kinds, policy, ram_blocks))
        return built[-1]

    yield make
    for house in built:
        house.tiers.close()


def keys(blocks: list[BlockMeta]) -> list[bytes]:
    return [block.key for block in blocks]


SUBSETS = ["ram", "disk", "remote", "ram disk", "ram remote", "disk remote", "ram disk remote"]


@pytest.mark.parametrize("kinds", SUBSETS)
def test_any_subset_keeps_and_gives_back(build: Build, kinds: str) -> None:
    house, blocks = build(kinds), chain("a", 20)
    house.save(blocks)
    load = house.load(blocks)
    assert load.outcomes == [Outcome.OK] * 20
    assert load.ready() == 20
    assert list(load.shares) == kinds.split()[:1]
    stats = house.tiers.stats()
    assert [stats.tiers[name].blocks for name in kinds.split() if name != "remote"] == [20] * (
        len(kinds.split()) - ("remote" in kinds)
    )
    if house.ram is not None:
        house.ram.check_invariants()
    if house.disk is not None:
        house.disk.check_invariants()


def test_no_tiers_find_nothing_and_keep_nothing(build: Build) -> None:
    house, blocks = build(""), chain("a", 2)
    assert house.tiers.computed(blocks, payloads(blocks)) is None
    assert house.tiers.lookup(keys(blocks)).places == [NOWHERE] * 2
    assert house.load(blocks).outcomes == [Outcome.MISS] * 2
    assert house.tiers.load([], [], []).done


def test_what_is_in_no_tier_is_a_miss_and_the_rest_comes(build: Build) -> None:
    house, blocks = build("ram disk"), chain("a", 6)
    house.save(blocks[:3])
    assert house.tiers.lookup(keys(blocks)).prefix() == 3
    assert house.load(blocks).outcomes == [Outcome.OK] * 3 + [Outcome.MISS] * 3


def test_a_hit_on_disk_is_promoted_to_ram(build: Build) -> None:
    house, blocks = build("ram disk"), chain("a", 6)
    house.save(blocks)
    assert house.ram is not None
    house.ram.discard(keys(blocks))
    assert house.tiers.lookup(keys(blocks)).places == [1] * 6
    assert list(house.load(blocks).shares) == ["disk"]
    assert house.tiers.lookup(keys(blocks)).places == [0] * 6
    assert list(house.load(blocks).shares) == ["ram"]


def test_what_leaves_a_tier_after_the_lookup_comes_from_the_next(build: Build) -> None:
    house, blocks = build("ram disk"), chain("a", 4)
    house.save(blocks)
    places = house.tiers.lookup(keys(blocks)).places
    assert house.ram is not None
    house.ram.discard(keys(blocks[1:3]))
    load = house.tiers.load(blocks, into := room(4), places)
    house.wait(load)
    assert load.outcomes == [Outcome.OK] * 4
    assert into == payloads(blocks)
    assert {name: share.blocks for name, share in load.shares.items()} == {"ram": 2, "disk": 2}


def test_what_is_hit_nearby_stays_young_on_disk(build: Build) -> None:
    house, hot = build("ram disk"), chain("hot", 3)
    house.save(hot)
    for name in range(150):  # more than the disk holds
        house.save(chain(name, 3))
        if name % 2:
            house.load(hot)
        else:
            house.tiers.used(keys(hot))
        assert house.tiers.drain(20)
    assert house.disk is not None
    assert house.disk.stats().evicted > 0
    assert house.disk.contains(keys(hot)) == [True] * 3


def test_prefetch_brings_blocks_into_ram(build: Build) -> None:
    house, blocks = build("ram disk"), chain("a", 8)
    house.save(blocks)
    assert house.ram is not None
    house.ram.discard(keys(blocks))
    load = house.tiers.prefetch(blocks, house.tiers.lookup(keys(blocks)).places)
    assert load is not None
    house.wait(load)
    assert house.tiers.lookup(keys(blocks)).places == [0] * 8
    assert house.tiers.prefetch(blocks, [0] * 8) is None
    house.load(blocks)
    house.ram.check_invariants()


def test_a_prefetch_that_fails_gives_its_slots_back(build: Build) -> None:
    house, blocks = build("ram disk"), chain("a", 8)
    load = house.tiers.prefetch(blocks, [1] * 8)
    assert load is not None
    house.wait(load)
    assert load.outcomes == [Outcome.MISS] * 8
    assert house.ram is not None
    house.ram.check_invariants()


def test_two_servers_share_a_remote(build: Build) -> None:
    shared = Shared()
    one, two, blocks = build("ram remote", shared), build("disk remote", shared), chain("a", 8)
    one.save(blocks)
    load = two.load(blocks)
    assert load.outcomes == [Outcome.OK] * 8
    assert list(load.shares) == ["remote"]


def test_what_the_remote_is_asked_for_often_stays_on_disk(build: Build) -> None:
    shared = Shared()
    one, two, blocks = build("remote", shared), build("disk remote", shared), chain("a", 4)
    one.save(blocks)
    seen = [list(two.load(blocks).shares) for _ in range(6)]
    assert seen[0] == ["remote"]
    assert seen[-1] == ["disk"]


def test_a_remote_that_lies_is_a_miss(build: Build) -> None:
    shared, blocks = Shared(), chain("a", 4)
    one = build("remote", shared)
    one.save(blocks)
    value = bytearray(shared.values[blocks[1].key])
    value[-1] ^= 1
    shared.values[blocks[1].key] = bytes(value)
    shared.values[blocks[2].key] = shared.values[blocks[0].key]
    ok, corrupt = Outcome.OK, Outcome.CORRUPT
    assert one.load(blocks).outcomes == [ok, corrupt, corrupt, ok]
    assert set(shared.values) == {blocks[0].key, blocks[3].key}


def test_a_remote_that_hangs_blocks_nobody(build: Build) -> None:
    shared, blocks, others = Shared(), chain("a", 4), chain("b", 4)
    house = build("ram remote", shared)
    house.save(blocks)
    shared.gate.clear()
    start = time.monotonic()
    found = house.tiers.lookup(keys(blocks + others))
    assert found.places == [0] * 4 + [NOWHERE] * 4
    assert not found.done
    assert time.monotonic() - start < 5
    assert house.tiers.lookup(keys(blocks)).done
    assert house.load(blocks).outcomes == [Outcome.OK] * 4
    shared.gate.set()
    assert house.tiers.drain(20)
    assert found.done


def test_saves_that_a_tier_cannot_follow_are_dropped_and_counted(build: Build) -> None:
    shared = Shared()
    house = build("remote", shared)
    shared.gate.clear()
    saves = []
    for name in range(100):
        blocks = chain(name, 8)
        saves.append(house.tiers.computed(blocks, payloads(blocks)))
    stats = house.tiers.stats()
    assert stats.waiting["remote"][1] <= 256
    assert stats.behind["remote"] >= 800 - 256 - 2 * 8
    shared.gate.set()
    for save in saves:
        assert save is not None
    assert house.tiers.drain(20)
    assert sum(save.done for save in saves if save) == 100
    assert sum(save.stored for save in saves if save) == 800 - stats.behind["remote"]


@pytest.mark.parametrize("kinds", ["ram disk", "disk"])
def test_one_save_may_be_larger_than_the_queue(build: Build, kinds: str) -> None:
    house, blocks = build(kinds, ram_blocks=32), chain("a", 300)
    house.save(blocks)
    assert house.disk is not None
    here = house.disk.contains(keys(blocks)).index(False) if house.tiers.stats().behind["disk"] else 300
    assert here >= 240  # of too many the first are taken


def test_a_long_chain_goes_on_to_disk_when_ram_is_small(build: Build) -> None:
    house, blocks = build("ram disk", ram_blocks=5), chain("a", 40)
    house.save(blocks)
    assert house.disk is not None
    assert house.disk.contains(keys(blocks)) == [True] * 40
    assert house.load(blocks).outcomes == [Outcome.OK] * 40


def test_on_eviction_nothing_is_written_before(build: Build) -> None:
    house, blocks = build("ram disk", policy=WritePolicy.ON_EVICTION), chain("a", 4)
    assert house.tiers.computed(blocks, payloads(blocks)) is None
    assert house.tiers.lookup(keys(blocks)).places == [NOWHERE] * 4
    for block in reversed(blocks):
        house.tiers.evicted(block, payload(block))
    assert house.tiers.lookup(keys(blocks)).places == [0] * 4


def test_on_eviction_ram_spills_to_disk(build: Build) -> None:
    house = build("ram disk", policy=WritePolicy.ON_EVICTION, ram_blocks=32)
    chains = [chain(name, 4) for name in range(20)]
    for blocks in chains:
        for block in reversed(blocks):
            house.tiers.evicted(block, payload(block))
        assert house.tiers.drain(20)
    assert house.ram is not None
    house.ram.check_invariants()
    assert house.ram.num_free >= 1
    for blocks in chains:
        assert house.load(blocks).outcomes == [Outcome.OK] * 4


def test_swapped_out_blocks_come_back_from_ram(build: Build) -> None:
    house, blocks = build("ram disk", policy=WritePolicy.ON_EVICTION), chain("a", 4)
    save = house.tiers.swap_out(blocks, payloads(blocks))
    assert save is not None
    house.wait(save)
    assert save.stored == 4
    assert list(house.load(blocks).shares) == ["ram"]
    assert build("disk").tiers.swap_out(blocks, payloads(blocks)) is None


def test_a_cancelled_load_comes_back_all_the_same(build: Build) -> None:
    shared, blocks = Shared(), chain("a", 8)
    house = build("remote", shared)
    house.save(blocks)
    shared.gate.clear()
    first, second = (house.tiers.load(blocks, room(8), [0] * 8) for _ in range(2))
    third = house.tiers.load(blocks, room(8), [0] * 8)
    third.cancel()
    shared.gate.set()
    done: list[Load | Save] = []
    end = time.monotonic() + 20
    while len(done) < 3 and time.monotonic() < end:
        done += house.tiers.poll()
        house.news.wait(0.05)
    assert set(done) == {first, second, third}
    assert third.outcomes == [Outcome.MISS] * 8


def test_speeds_are_learnt(build: Build) -> None:
    house, blocks = build("disk"), chain("a", 100)
    before = house.tiers.speeds()[0]
    house.save(blocks)
    for _ in range(3):
        house.load(blocks)
    assert house.tiers.speeds()[0] != before
    assert house.tiers.stats().speeds["disk"].bandwidth > 0


def test_after_close_everything_is_a_miss(build: Build) -> None:
    house, blocks = build("ram disk"), chain("a", 4)
    house.save(blocks)
    places = house.tiers.lookup(keys(blocks)).places
    house.tiers.close()
    load = house.tiers.load(blocks, room(4), places)
    assert load.done
    assert load.outcomes == [Outcome.MISS] * 4
