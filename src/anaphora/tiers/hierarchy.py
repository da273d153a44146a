"""Pool -> RAM -> disk -> remote: finds blocks, brings them back, keeps what leaves. Nothing here blocks its caller.

    lookup    one question about all blocks of a request     the local tiers answer at once, a remote later
    load      blocks into the pool's memory                  a worker per tier and piece; what fails tries the next tier
    prefetch  blocks of slower tiers into the RAM tier       while the request waits in the queue
    computed, evicted, swap_out                              see saving.py

The engine's thread calls, worker threads do, and `poll` hands over what became done since the last time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from time import monotonic

from anaphora.tiers.break_even import LoadSpeed, SpeedEstimate
from anaphora.tiers.lanes import Lane
from anaphora.tiers.ram import RamTier
from anaphora.tiers.saving import Saver, WritePolicy
from anaphora.tiers.store import BlockMeta, BlockStore, Outcome, TierStats
from anaphora.tiers.transfers import NOWHERE, Load, Lookup, Save, TierShare

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tier:
    """A store in its place in the hierarchy."""

    store: BlockStore
    threads: int
    expected: LoadSpeed
    """Until it has been measured."""
    keep_locally: Callable[[Sequence[bytes]], list[bool]] | None = None
    """Of a remote: which of the blocks just read from it are read so often that a nearer tier should have them."""
    max_saves: int = 256
    """Blocks that may wait to be written; more are dropped."""
    piece_bytes: int = 2 << 20
    """About what a worker loads in one go: long enough to be worth it, short enough to share among the workers."""

    @property
    def local(self) -> bool:
        """Whether the store's `contains` answers at once."""
        return self.keep_locally is None


@dataclass(frozen=True, slots=True)
class HierarchyStats:
    """By the tiers' names."""

    tiers: dict[str, TierStats]
    speeds: dict[str, LoadSpeed]
    waiting: dict[str, tuple[int, int]]
    """(pieces of loads, blocks of saves) that have not begun."""
    behind: dict[str, int]
    """Blocks that were not even queued for a save: the tier was behind."""
    unavailable: dict[str, str]
    """Tiers that were asked for and could not be opened, and why."""


class Hierarchy:
    """Tiers in order, nearest first. Call it from one thread; `on_ready` is called on others when there is news."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        policy: WritePolicy = WritePolicy.THROUGH,
        on_ready: Callable[[], None] = lambda: None,
        unavailable: Mapping[str, str] | None = None,
        lane: Callable[[str, int, int], Lane] = Lane,
    ) -> None:
        """`unavailable`: tiers that should be here and are not, and why; only reported.

        `lane` makes what works for a tier; a simulation gives one that does everything at once.
        """
        self.tiers = tuple(tiers)
        self._unavailable = dict(unavailable or {})
        self._on_ready = on_ready
        self._near = next((i for i, tier in enumerate(tiers) if isinstance(tier.store, RamTier)), NOWHERE)
        ram = tiers[self._near].store if self._near != NOWHERE else None
        self._ram = ram if isinstance(ram, RamTier) else None
        self._lanes = [lane(tier.store.name, tier.threads, tier.max_saves) for tier in tiers]
        self._speeds = [SpeedEstimate(tier.expected) for tier in tiers]
        self._finished: deque[Load | Save] = deque()
        self._lock = Lock()
        self._saver = Saver([tier.store for tier in tiers], self._lanes, self._ram, policy, self._finish)
        self.computed = self._saver.computed
        self.evicted = self._saver.evicted
        self.swap_out = self._saver.swap_out

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        """Where these are, by tier. Local tiers now; a remote is asked for the rest and fills in `places` later."""
        answer = Lookup([NOWHERE] * len(keys), done=True)
        missing: Sequence[int] = range(len(keys))
        for index, tier in enumerate(self.tiers):
            if tier.local and missing:
                missing = self._ask(index, keys, missing, answer)
        for index, tier in enumerate(self.tiers):
            if not tier.local and missing:
                answer.done = False  # before the question is out: its answer may come at once
                if not self._lanes[index].load(self._question(index, keys, missing, answer)):
                    answer.done = True
        return answer

    def load(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview], places: Sequence[int]) -> Load:
        """Start to bring blocks into `into`, from where `lookup` found them. `poll` gives it back, always."""
        return self._start(Load(blocks, into), places)

    def prefetch(self, blocks: Sequence[BlockMeta], places: Sequence[int]) -> Load | None:
        """Start to bring blocks that lie beyond the RAM tier into it. `poll` gives the load back.

        None: no RAM tier, or nothing to do. Until it is done a `load` of the same blocks would read them twice.
        """
        if self._ram is None:
            return None
        ram, wanted, slots, views, far = self._ram, [], [], [], []
        for block, place in zip(blocks, places, strict=True):
            if place > self._near and (reserved := ram.reserve(block, orphans=True)) is not None:
                wanted.append(block)
                slots.append(reserved[0])
                views.append(reserved[1])
                far.append(place)

        def arrived(index: int, whole: bool) -> None:
            if whole:
                ram.publish(slots[index], wanted[index])
            else:
                ram.abandon(slots[index])

        return self._start(Load(wanted, views, arrived), far) if wanted else None

    def used(self, keys: Sequence[bytes]) -> None:
        """These were hit in the pool: their copies in the local tiers are not to grow old. Done in the background."""
        self._used(keys, 0)

    def poll(self) -> list[Load | Save]:
        """The transfers that became done since the last call."""
        done: list[Load | Save] = []
        while self._finished:
            done.append(self._finished.popleft())
        return done

    def speeds(self) -> list[LoadSpeed]:
        """What each tier is expected to take now; for break_even.blocks_to_load."""
        return [estimate.speed() for estimate in self._speeds]

    def stats(self) -> HierarchyStats:
        names = [tier.store.name for tier in self.tiers]
        return HierarchyStats(
            tiers={tier.store.name: tier.store.stats() for tier in self.tiers},
            speeds=dict(zip(names, self.speeds(), strict=True)),
            waiting={name: lane.waiting for name, lane in zip(names, self._lanes, strict=True)},
            behind={name: lane.dropped for name, lane in zip(names, self._lanes, strict=True)},
            unavailable=self._unavailable,
        )

    def drain(self, timeout: float) -> bool:
        """Wait until all that was started is done; False after `timeout` seconds. For shutdown and tests: it blocks."""
        end = monotonic() + timeout
        # Nearest first: what a lane saves, it hands on to those behind it. Twice: a failed load goes on as well.
        lanes = [*self._lanes, *self._lanes]
        return all(lane.drain(max(0.0, end - monotonic())) for lane in lanes)

    def close(self, timeout: float = 10.0) -> None:
        """Finish what is queued, within `timeout` seconds, and close the stores. It blocks."""
        self.drain(timeout)
        ended = [lane.close(1.0) for lane in self._lanes]
        for tier, idle in zip(self.tiers, ended, strict=True):
            if idle:  # a store that a thread hangs in is left to the end of the process
                tier.store.close()

    # On worker threads

    def _question(self, tier: int, keys: Sequence[bytes], missing: Sequence[int], answer: Lookup) -> Callable[[], None]:
        def ask() -> None:
            try:
                self._ask(tier, keys, missing, answer)
            finally:
                answer.done = True
                self._on_ready()

        return ask

    def _ask(self, tier: int, keys: Sequence[bytes], missing: Sequence[int], answer: Lookup) -> list[int]:
        """Note which of keys[missing] the tier has; the indices of the others."""
        asked = keys if len(missing) == len(keys) else [keys[i] for i in missing]
        still: list[int] = []
        for i, here in zip(missing, self.tiers[tier].store.contains(asked), strict=True):
            if here:
                answer.places[i] = tier
            else:
                still.append(i)
        return still

    def _start(self, load: Load, places: Sequence[int]) -> Load:
        by_tier: dict[int, list[int]] = {}
        for i, place in enumerate(places):
            by_tier.setdefault(place, []).append(i)
        if not load.blocks:
            self._finish(load)
        self._settle(load, by_tier.pop(NOWHERE, []), Outcome.MISS)
        for place, indices in by_tier.items():
            step = max(1, self.tiers[place].piece_bytes // max(1, load.into[indices[0]].nbytes))
            for start in range(0, len(indices), step):
                self._send(load, indices[start : start + step], place, Outcome.MISS)
        return load

    def _send(self, load: Load, indices: Sequence[int], tier: int, last: Outcome) -> None:
        """Let a tier try these blocks; when there is none left, or it is closed, that was their last outcome."""
        if not indices:
            return
        if tier == len(self.tiers) or not self._lanes[tier].load(lambda: self._load_piece(load, indices, tier)):
            self._settle(load, indices, last)

    def _load_piece(self, load: Load, indices: Sequence[int], tier: int) -> None:
        if load.cancelled:
            self._settle(load, indices, Outcome.MISS)
            return
        store = self.tiers[tier].store
        blocks, into = [load.blocks[i] for i in indices], [load.into[i] for i in indices]
        try:
            outcomes = store.load(blocks, into)
        except Exception:
            log.exception("the %s tier raised; this is a bug of its store", store.name)
            outcomes = [Outcome.FAILED] * len(blocks)
        whole = [i for i, outcome in zip(indices, outcomes, strict=True) if outcome is Outcome.OK]
        self._account(load, whole, tier)
        if whole:
            try:
                self._promote(load, whole, tier)
            except Exception:  # a load comes back, whatever happens
                log.exception("blocks could not be kept nearer by; this is a bug of a store")
            self._settle(load, whole, Outcome.OK)
            self._used([load.blocks[i].key for i in whole], tier + 1)
        failed: dict[Outcome, list[int]] = {}
        for i, outcome in zip(indices, outcomes, strict=True):
            if outcome is not Outcome.OK:
                failed.setdefault(outcome, []).append(i)
        for outcome, rest in failed.items():
            self._send(load, rest, tier + 1, outcome)

    def _used(self, keys: Sequence[bytes], first: int) -> None:
        """What is hit in a near tier stays young in those behind it: it should survive a restart, and RAM's limit."""
        for index in range(first, len(self.tiers)):
            if self.tiers[index].local:
                # As a save of nothing: it may wait, and when the tier is behind it may be left out.
                self._lanes[index].save(lambda store=self.tiers[index].store: store.used(keys), 1)  # type: ignore[misc]

    def _account(self, load: Load, whole: Sequence[int], tier: int) -> None:
        seconds = monotonic() - load.started
        with self._lock:
            share = load.shares.setdefault(self.tiers[tier].store.name, TierShare())
            share.blocks += len(whole)
            share.nbytes += sum(load.into[i].nbytes for i in whole)
            share.seconds = seconds

    def _promote(self, load: Load, whole: Sequence[int], tier: int) -> None:
        """Keep what came from far nearer: in RAM, and what the remote is asked for often on disk as well."""
        blocks, data = [load.blocks[i] for i in whole], [load.into[i] for i in whole]
        if tier > self._near and load.arrived is None:
            self._saver.promote(blocks, data)
        keep_locally = self.tiers[tier].keep_locally
        if keep_locally is not None:
            hot = keep_locally([block.key for block in blocks])
            self._saver.keep(
                [block for block, often in zip(blocks, hot, strict=True) if often],
                [view for view, often in zip(data, hot, strict=True) if often],
                before=tier,
            )

    def _settle(self, load: Load, indices: Sequence[int], outcome: Outcome) -> None:
        for i in indices:
            if load.arrived is not None:
                load.arrived(i, outcome is Outcome.OK)
            load.outcomes[i] = outcome
        with self._lock:
            load.left -= len(indices)
            done = bool(indices) and load.left == 0
        if done:
            for index, tier in enumerate(self.tiers):
                if (share := load.shares.get(tier.store.name)) is not None and share.blocks:
                    self._speeds[index].observe(share.nbytes, share.seconds)
            self._finish(load)

    def _finish(self, transfer: Load | Save) -> None:
        self._finished.append(transfer)
        self._on_ready()
