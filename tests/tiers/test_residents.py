"""What the tiers tell a policy: each block once in, used while it is here, once out; and what may go is right."""

from __future__ import annotations

import random

import pytest

from anaphora.blocks.eviction import LRU, POLICIES, make_policy
from anaphora.blocks.eviction.base import EvictionPolicy
from anaphora.tiers.residents import Entry, Residents
from anaphora.tiers.store import BlockMeta
from support.stored_blocks import chain

Kept = Entry[None]
CHAINS = [chain(name, 4) for name in range(8)]


class Watched(EvictionPolicy[Kept]):
    """Passes everything on, and knows what the policy must know."""

    def __init__(self, policy: EvictionPolicy[Kept]) -> None:
        self._policy = policy
        self.known: set[Kept] = set()
        self.candidates: set[Kept] = set()

    def insert(self, entry: Kept, parent: Kept | None) -> None:
        assert entry not in self.known
        assert parent is None or parent in self.known
        self.known.add(entry)
        self._policy.insert(entry, parent)

    def hit(self, entry: Kept) -> None:
        assert entry in self.known
        self._policy.hit(entry)

    def forget(self, entry: Kept) -> None:
        assert entry not in self.candidates
        self.known.remove(entry)
        self._policy.forget(entry)

    def add(self, entry: Kept) -> None:
        assert entry in self.known - self.candidates
        self.candidates.add(entry)
        self._policy.add(entry)

    def remove(self, entry: Kept) -> None:
        self.candidates.remove(entry)
        self._policy.remove(entry)

    def pop(self) -> Kept:
        entry = self._policy.pop()
        self.candidates.remove(entry)
        self.known.remove(entry)
        return entry

    def __len__(self) -> int:
        assert len(self._policy) == len(self.candidates)
        return len(self._policy)


def entry_of(block: BlockMeta, used: int) -> Kept:
    return Entry(block.key, block.parent, block.depth, None, used)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(3))
def test_any_program_keeps_policy_and_tier_of_one_mind(name: str, seed: int) -> None:
    dice = random.Random(seed)
    watched = Watched(make_policy(name))
    residents: Residents[None] = Residents(watched)
    pinned: list[Kept] = []
    leaving: list[Kept] = []
    evicted = 0  # to make room
    for _ in range(1500):
        block = dice.choice(CHAINS)[dice.randrange(4)]
        known = residents.get(block.key)
        match dice.randrange(8):
            case 0 | 1 if known is None:
                residents.add(entry_of(block, residents.tick()))
            case 2 if known is None and (victim := residents.make_room(block, orphans=dice.random() < 0.5)) is not None:
                evicted += 1
                assert victim.hash != block.parent
                residents.add(entry_of(block, residents.tick()))
            case 3 if known is not None:
                residents.touch(known)
            case 4 if known is not None:
                residents.pin(known)
                pinned.append(known)
            case 5 if pinned:
                residents.unpin(pinned.pop(dice.randrange(len(pinned))))
            case 6 if dice.random() < 0.3 and (victim := residents.dismiss()) is not None:
                leaving.append(victim)
                assert victim.hash in residents
            case 7 if leaving:
                victim = leaving.pop(0)
                residents.unpin(victim)
                residents.remove(victim)
                assert residents.get(victim.hash) is not victim
            case _ if known is not None and dice.random() < 0.1:
                residents.remove(known)
        residents.check_invariants()
        assert watched.known == {entry for entry in residents.entries() if not entry.leaving}
    assert evicted > 10


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_what_is_restored_is_as_if_it_had_been_added(name: str) -> None:
    watched = Watched(make_policy(name))
    residents: Residents[None] = Residents(watched)
    entries = [entry_of(block, used) for used, block in enumerate((b for each in CHAINS for b in reversed(each)), 5)]
    residents.restore(entries)
    residents.check_invariants()
    assert residents.clock == entries[-1].last_used
    assert watched.known == set(entries)
    gone: set[bytes] = set()
    while (victim := residents.pop()) is not None:
        gone.add(victim.hash)
        assert all(block.key in gone for each in CHAINS for block in each if block.parent == victim.hash)
    assert len(gone) == len(entries)


def test_the_least_recently_used_leaf_goes_first_after_a_restart() -> None:
    residents: Residents[None] = Residents(LRU())
    old, new = CHAINS[:2]
    residents.restore([entry_of(block, used) for used, block in enumerate([*old, *new], 1)])
    order = [residents.pop() for _ in range(8)]
    assert [entry.hash for entry in order if entry] == [block.key for block in [*reversed(old), *reversed(new)]]
