"""The RAM tier: one arena of equal slots, taken from the system as they are first used.

The byte limit covers the slots and a fixed allowance for each entry's Python objects; it is kept by construction,
since the arena is never larger. Bytes are not checksummed here: they never leave the process. Tokens are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from time import perf_counter

from anaphora.blocks.eviction import EvictionPolicy
from anaphora.errors import ConfigError
from anaphora.tiers.memory import copy, page_buffer
from anaphora.tiers.residents import Entry, Residents
from anaphora.tiers.stats import Counters
from anaphora.tiers.store import BlockMeta, Outcome, TierStats

ENTRY_BYTES = 1024
"""Allowance for what Python keeps per block: entry, key, parent, tokens, their places in dictionaries and heap."""

RamEntry = Entry[tuple[int, BlockMeta]]


class RamTier:
    """Blocks of `block_bytes` bytes. Thread-safe; raises ConfigError when the limit holds not even one."""

    name = "ram"

    def __init__(
        self,
        limit_bytes: int,
        block_bytes: int,
        policy: EvictionPolicy[RamEntry],
        *,
        keeps_orphans: bool = False,
    ) -> None:
        """`keeps_orphans`: make room even for a block whose parent is not here (blocks come leaves first)."""
        self.capacity = limit_bytes // (block_bytes + ENTRY_BYTES)
        if self.capacity < 1:
            raise ConfigError(
                f"a RAM cache of {limit_bytes:,} bytes holds no block: one takes {block_bytes + ENTRY_BYTES:,}. "
                "Give --ram-cache more, or leave it out"
            )
        self.block_bytes = block_bytes
        self._keeps_orphans = keeps_orphans
        self.arena = page_buffer(self.capacity * block_bytes)
        """All slots; a remote store may register it."""
        self._free = list(range(self.capacity - 1, -1, -1))
        self._residents: Residents[tuple[int, BlockMeta]] = Residents(policy)
        self._lock = Lock()
        self._counters = Counters(limit_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._residents.contains(keys)

    def load(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        start = perf_counter()
        outcomes = [self._load(block, view) for block, view in zip(blocks, into, strict=True)]
        self._counters.loaded(outcomes, [view.nbytes for view in into], perf_counter() - start)
        return outcomes

    def save(self, blocks: Sequence[BlockMeta], data: Sequence[memoryview], *, orphans: bool = False) -> list[Outcome]:
        """As every store; `orphans`: blocks whose parents are on their way here may push others out."""
        start, written, outcomes = perf_counter(), 0, []
        for block, view in zip(blocks, data, strict=True):
            outcome, size = self._save(block, view, orphans)
            outcomes.append(outcome)
            written += size
        self._counters.saved(outcomes, written, perf_counter() - start)
        return outcomes

    def discard(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                if (entry := self._residents.get(key)) is not None:
                    self._residents.remove(entry)
                    self._give_back(entry)

    def reserve(self, block: BlockMeta, *, orphans: bool = False) -> tuple[int, memoryview] | None:
        """An empty slot and its memory, to be filled by the caller, who then calls `publish` or `abandon`.

        None when the block is here already or no room may be made for it.
        """
        with self._lock:
            if (known := self._residents.get(block.key)) is not None:
                self._residents.touch(known)
                return None
            slot = self._take_slot(block, orphans)
        return None if slot is None else (slot, self._slot(slot))

    def publish(self, slot: int, block: BlockMeta) -> None:
        """A reserved slot is whole now: the block can be found."""
        with self._lock:
            if block.key in self._residents:  # another thread was faster
                self._free.append(slot)
            else:
                self._residents.add(Entry(block.key, block.parent, block.depth, (slot, block), self._residents.tick()))

    def abandon(self, slot: int) -> None:
        """A reserved slot was not filled."""
        with self._lock:
            self._free.append(slot)

    def used(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                if (entry := self._residents.get(key)) is not None:
                    self._residents.touch(entry)

    def borrow(self, block: BlockMeta) -> tuple[RamEntry, memoryview] | None:
        """Pin a block and look at its bytes, which stay until `give_back`. None when it is not here."""
        with self._lock:
            entry = self._residents.get(block.key)
            if entry is None or not _same(entry.place[1], block):
                return None
            self._residents.pin(entry)
            return entry, self._slot(entry.place[0])

    def give_back(self, entry: RamEntry) -> None:
        """Undo one `borrow`."""
        with self._lock:
            if self._residents.unpin(entry):
                self._free.append(entry.place[0])

    def borrow_victims(self, free: int) -> list[tuple[RamEntry, memoryview]]:
        """Pin the blocks that go next, as many as are missing to `free` free slots: they can be saved elsewhere first.

        Follow with `give_back` and `discard` of each.
        """
        taken: list[tuple[RamEntry, memoryview]] = []
        with self._lock:
            while len(self._free) + len(taken) < free and (entry := self._residents.dismiss()) is not None:
                taken.append((entry, self._slot(entry.place[0])))
        return taken

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def stats(self) -> TierStats:
        blocks = len(self._residents)
        return self._counters.snapshot(used_bytes=blocks * (self.block_bytes + ENTRY_BYTES), blocks=blocks)

    def check_invariants(self) -> None:
        """Raises BlockStateError when slots or entries are lost or counted twice. For a moment without borrowers."""
        with self._lock:
            self._residents.check_invariants()
            assert len(self._free) + len(self._residents) == self.capacity, "slots of the RAM tier are lost"

    def close(self) -> None:
        """Nothing is held but memory, which goes with the last reference."""

    def _slot(self, index: int) -> memoryview:
        return self.arena[index * self.block_bytes : (index + 1) * self.block_bytes]

    def _load(self, block: BlockMeta, into: memoryview) -> Outcome:
        with self._lock:
            entry = self._residents.get(block.key)
            if entry is None or into.nbytes != self.block_bytes or not _same(entry.place[1], block):
                return Outcome.MISS
            self._residents.pin(entry)
            self._residents.touch(entry)
        copy(into, self._slot(entry.place[0]))
        self.give_back(entry)
        return Outcome.OK

    def _save(self, block: BlockMeta, data: memoryview, orphans: bool) -> tuple[Outcome, int]:
        if data.nbytes != self.block_bytes:
            return Outcome.DROPPED, 0
        reserved = self.reserve(block, orphans=orphans)
        if reserved is None:
            return (Outcome.OK if block.key in self._residents else Outcome.DROPPED), 0
        slot, memory = reserved
        copy(memory, data)
        self.publish(slot, block)
        return Outcome.OK, data.nbytes

    def _take_slot(self, block: BlockMeta, orphans: bool) -> int | None:
        if self._free:
            return self._free.pop()
        victim = self._residents.make_room(block, orphans=orphans or self._keeps_orphans)
        if victim is None:
            return None
        self._counters.evicted(1)
        return victim.place[0]

    def _give_back(self, entry: RamEntry) -> None:
        if not entry.pins:
            self._free.append(entry.place[0])


def _same(held: BlockMeta, asked: BlockMeta) -> bool:
    return held.parent == asked.parent and held.tokens == asked.tokens and held.space.digest == asked.space.digest
