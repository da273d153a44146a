"""Blocks on their way out: from the pool into RAM, from there to disk and remote.

    write-through   computed -> RAM -> disk, remote        giving a block up later costs nothing
    on-eviction     evicted  -> RAM; RAM nearly full -> disk, remote

A tier that is behind drops what it is given, counted: the pool never waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from threading import Lock

from anaphora.tiers.lanes import Lane
from anaphora.tiers.ram import RamEntry, RamTier
from anaphora.tiers.store import BlockMeta, BlockStore, Outcome
from anaphora.tiers.transfers import Save

_PIECE = 16
"""Blocks of one write from the pool's memory."""
_SPARE = 8
"""One slot in so many of the RAM tier is kept free for what the pool evicts; a burst of more loses the rest."""


class WritePolicy(Enum):
    """When a block goes to the tiers."""

    THROUGH = "write-through"
    """As soon as it is computed: what was stored survives a kill, and giving it up later costs nothing."""
    ON_EVICTION = "on-eviction"
    """When the pool gives it up, and one tier further when RAM does: fewer writes. Needs a RAM tier."""


class Saver:
    """`finish` is called on a worker with each Save that is done."""

    def __init__(
        self,
        stores: Sequence[BlockStore],
        lanes: Sequence[Lane],
        ram: RamTier | None,
        policy: WritePolicy,
        finish: Callable[[Save], None],
    ) -> None:
        self._stores = stores
        self._lanes = lanes
        self._ram = ram
        self._beyond = [i for i, store in enumerate(stores) if store is not ram]
        self._policy = policy if ram is not None else WritePolicy.THROUGH
        self._finish = finish
        self._lock = Lock()
        self._spilling = False

    def computed(self, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> Save | None:
        """These became whole, parents before children. None: nothing is to be done for them now.

        Otherwise the pool keeps their memory as it is until `poll` gives the Save back.
        """
        if self._policy is not WritePolicy.THROUGH:
            return None
        return self._save(blocks, data, self._beyond)

    def evicted(self, block: BlockMeta, data: memoryview) -> None:
        """The pool gives this block up now: its memory is copied before this returns, when the policy wants it."""
        if self._policy is WritePolicy.ON_EVICTION and self._ram is not None:
            self._ram.save([block], [data])
            self._spill_if_full()

    def swap_out(self, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> Save | None:
        """Bring a preempted request's blocks into the RAM tier, and no further. None: there is no RAM tier."""
        return self._save(blocks, data, []) if self._ram is not None else None

    def promote(self, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> None:
        """On a worker: keep blocks of a slower tier in RAM as well, if there is one."""
        if self._ram is None:
            return
        if self._policy is WritePolicy.THROUGH:
            self._ram.save(blocks, data, orphans=True)
            return
        free = self._ram.num_free  # what RAM holds may be nowhere else: it is not pushed out for a copy
        self._ram.save(blocks[:free], data[:free])
        self._spill_if_full()

    def keep(self, blocks: Sequence[BlockMeta], data: Sequence[memoryview], *, before: int) -> None:
        """On a worker: store blocks of tier `before` in the tiers nearer than it, RAM left out."""
        for i in self._beyond:
            if i < before and blocks:
                self._stores[i].save(blocks, data)

    def _save(self, blocks: Sequence[BlockMeta], data: Sequence[memoryview], beyond: Sequence[int]) -> Save | None:
        if not blocks or not self._stores:
            return None
        save = Save(blocks, data, left=len(blocks))
        if self._ram is None:
            self._from_pool(save, range(len(blocks)), beyond, done=0)
        elif not self._lanes[self._stores.index(self._ram)].save(lambda: self._through_ram(save, beyond), len(blocks)):
            self._over(save, len(blocks), 0)
        return save

    def _through_ram(self, save: Save, beyond: Sequence[int]) -> None:
        """Copy into RAM, let go of the pool's memory, hand on from RAM; what RAM will not take goes by itself."""
        assert self._ram is not None
        outcomes = self._ram.save(save.blocks, save.data)
        taken = [block for block, outcome in zip(save.blocks, outcomes, strict=True) if outcome is Outcome.OK]
        for i in beyond:
            self._hand_on(taken, i)
        rest = [i for i, outcome in enumerate(outcomes) if outcome is not Outcome.OK]
        self._from_pool(save, rest, beyond, done=len(taken))

    def _from_pool(self, save: Save, indices: Sequence[int], beyond: Sequence[int], done: int) -> None:
        """Write these blocks of a save to the tiers beyond RAM. The other `done` blocks are over, and stored."""
        with self._lock:
            save.left += len(indices) * len(beyond)  # before the first of them can end
        for tier in beyond:
            for start in range(0, len(indices), _PIECE):  # so that of too many the first are taken
                self._queue(save, indices[start : start + _PIECE], tier)
        self._over(save, done + len(indices), done)

    def _queue(self, save: Save, indices: Sequence[int], tier: int) -> None:
        if not self._lanes[tier].save(lambda: self._write(save, indices, tier), len(indices)):
            self._over(save, len(indices), 0)

    def _write(self, save: Save, indices: Sequence[int], tier: int) -> None:
        stored = 0
        try:
            outcomes = self._stores[tier].save([save.blocks[i] for i in indices], [save.data[i] for i in indices])
            stored = sum(outcome is Outcome.OK for outcome in outcomes)
        finally:
            self._over(save, len(indices), stored)

    def _hand_on(self, blocks: Sequence[BlockMeta], tier: int) -> None:
        """Queue a write from RAM to a tier; the slots are pinned until it is over."""
        assert self._ram is not None
        borrowed = [(block, *held) for block in blocks if (held := self._ram.borrow(block)) is not None]
        if borrowed and not self._lanes[tier].save(lambda: self._write_from_ram(borrowed, tier), len(borrowed)):
            self._give_back(entry for _, entry, _ in borrowed)

    def _write_from_ram(self, borrowed: Sequence[tuple[BlockMeta, RamEntry, memoryview]], tier: int) -> None:
        try:
            self._stores[tier].save([block for block, _, _ in borrowed], [view for _, _, view in borrowed])
        finally:
            self._give_back(entry for _, entry, _ in borrowed)

    def _give_back(self, entries: Iterable[RamEntry]) -> None:
        assert self._ram is not None
        for entry in entries:
            self._ram.give_back(entry)

    def _spill_if_full(self) -> None:
        assert self._ram is not None
        spare = max(1, self._ram.capacity // _SPARE)
        if self._ram.num_free >= spare or not self._beyond:
            return
        with self._lock:
            if self._spilling:
                return
            self._spilling = True
        if not self._lanes[self._beyond[0]].save(lambda: self._spill(spare), 1):
            self._spilling = False

    def _spill(self, spare: int) -> None:
        """Make room in RAM: what goes next is stored in the tiers beyond, then forgotten."""
        assert self._ram is not None
        try:
            while victims := self._ram.borrow_victims(spare):
                self._save_victims(victims)
        finally:
            self._spilling = False

    def _save_victims(self, victims: Sequence[tuple[RamEntry, memoryview]]) -> None:
        assert self._ram is not None
        blocks, data = [entry.place[1] for entry, _ in victims], [view for _, view in victims]
        try:
            for i in self._beyond:
                self._stores[i].save(blocks, data)
        finally:
            self._give_back(entry for entry, _ in victims)
            self._ram.discard([block.key for block in blocks])

    def _over(self, save: Save, writes: int, stored: int) -> None:
        with self._lock:
            save.left -= writes
            save.stored += stored
            done = save.left == 0
        if done:
            self._finish(save)
