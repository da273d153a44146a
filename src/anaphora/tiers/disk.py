"""The disk tier: blocks in segments, an index in memory that is rebuilt from the segments' tables at the start.

Every file has its final size from its making, so the byte limit is kept by never making one that does not fit. It
covers all bytes of all files in the folder, tables and lock included. The index in memory (about 400 bytes a
block) is not part of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from anaphora.blocks.eviction import EvictionPolicy
from anaphora.errors import ConfigError
from anaphora.tiers.directory import DirectoryLock, lock_bytes, next_path, open_segments
from anaphora.tiers.format import CorruptBlock
from anaphora.tiers.memory import PAGE
from anaphora.tiers.residents import Entry, Residents
from anaphora.tiers.segment import Segment, file_bytes, slot_bytes, slots_that_fit
from anaphora.tiers.stats import Counters
from anaphora.tiers.store import BlockMeta, Outcome, StoreError, TierStats

log = logging.getLogger(__name__)
_USUAL_SEGMENT = 64 << 20
_FEWEST_SEGMENTS, _MOST_SEGMENTS = 8, 64
"""A limit is cut into about so many files: small enough to give one up for another model, few enough to keep open."""
_REST_SECONDS = 30.0
"""How long nothing is written after the device refused a write."""


class Place(NamedTuple):
    segment: Segment
    slot: int


DiskEntry = Entry[Place]


class DiskTier:
    """Thread-safe. Raises ConfigError (folder in use, limit too small) and StoreError (the folder cannot be used)."""

    name = "disk"

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        policy: EvictionPolicy[DiskEntry],
        *,
        keeps_orphans: bool = False,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keeps_orphans`: make room even for a block whose parent is not here (blocks come leaves first)."""
        self.directory = directory
        self.limit_bytes = limit_bytes
        if limit_bytes < lock_bytes() + file_bytes(2 * PAGE, 1):
            raise ConfigError(f"a disk cache of {limit_bytes:,} bytes holds no block; give --disk-cache more")
        self._keeps_orphans = keeps_orphans
        self._wall_clock = wall_clock
        self._clock = clock
        self._residents: Residents[Place] = Residents(policy)
        self._counters = Counters(limit_bytes)
        self._lock = Lock()
        self._off, self._off_until = "", 0.0
        self._segments: list[Segment] = []
        self._held = DirectoryLock(directory)
        try:
            self._recover()
        except OSError as error:
            self.close()
            raise StoreError(f"{directory} cannot be used as a disk cache: {error.strerror}") from error

    @property
    def used_bytes(self) -> int:
        """Bytes of all files of the folder."""
        return lock_bytes() + sum(segment.file_bytes for segment in self._segments)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._residents.contains(keys)

    def load(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        start = time.perf_counter()
        reasons: list[str] = []
        outcomes = [self._load(block, view, reasons) for block, view in zip(blocks, into, strict=True)]
        if reasons:  # one line, however many there are
            log.warning("%d blocks of %s are removed: %s", len(reasons), self.directory, reasons[0])
        self._counters.loaded(outcomes, [view.nbytes for view in into], time.perf_counter() - start)
        return outcomes

    def save(self, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> list[Outcome]:
        start, written, outcomes = time.perf_counter(), 0, []
        for block, view in zip(blocks, data, strict=True):
            outcome, size = self._save(block, view)
            outcomes.append(outcome)
            written += size
        self._counters.saved(outcomes, written, time.perf_counter() - start)
        return outcomes

    def discard(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                if (entry := self._residents.get(key)) is not None:
                    self._forget(entry)

    def used(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            with self._lock:
                entry = self._residents.get(key)
                if entry is None:
                    continue
                self._residents.touch(entry)
                self._residents.pin(entry)
            self._note_use(entry)
            self._unpin(entry)

    def stats(self) -> TierStats:
        off = self._off if self._clock() < self._off_until else ""
        return self._counters.snapshot(used_bytes=self.used_bytes, blocks=len(self._residents), off=off)

    def check_invariants(self) -> None:
        """Raises BlockStateError when entries or slots are lost or counted twice. For a moment without readers."""
        with self._lock:
            self._residents.check_invariants()
            free = sum(len(segment.free) for segment in self._segments)
            slots = sum(segment.num_slots for segment in self._segments)
            assert free + len(self._residents) == slots, "slots of the disk tier are lost"
            assert self.used_bytes <= self.limit_bytes, "the disk tier is larger than its limit"

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments = []
        self._held.close()

    # Loading

    def _load(self, block: BlockMeta, into: memoryview, reasons: list[str]) -> Outcome:
        with self._lock:
            entry = self._residents.get(block.key)
            if entry is None:
                return Outcome.MISS
            self._residents.pin(entry)
            self._residents.touch(entry)
        segment, slot = entry.place
        outcome = Outcome.OK
        try:
            segment.read(slot, block, into)
        except CorruptBlock as error:
            outcome = Outcome.CORRUPT
            reasons.append(f"{segment.path.name}, slot {slot}: {error}")
        except OSError as error:
            outcome = Outcome.FAILED
            reasons.append(f"{segment.path.name}, slot {slot}: {error.strerror}")
        if outcome is Outcome.OK:
            self._note_use(entry)
        else:
            with self._lock:
                self._forget(entry)
        self._unpin(entry)
        return outcome

    def _note_use(self, entry: DiskEntry) -> None:
        """Let a pinned entry's age survive a restart. Not worth a miss when the device refuses."""
        with suppress(OSError):
            entry.place.segment.touch(entry.place.slot, entry.last_used)

    def _unpin(self, entry: DiskEntry) -> None:
        with self._lock:
            if self._residents.unpin(entry):
                entry.place.segment.free.append(entry.place.slot)

    def _forget(self, entry: DiskEntry) -> None:
        """Remove an entry for good. Its slot is free once nobody reads it."""
        self._residents.remove(entry)
        segment, slot = entry.place
        try:
            segment.wipe(slot)
        except OSError as error:
            self._rest(error)
        if not entry.pins:
            segment.free.append(slot)

    # Saving

    def _save(self, block: BlockMeta, data: memoryview) -> tuple[Outcome, int]:
        if self._clock() < self._off_until:
            return Outcome.DROPPED, 0
        with self._lock:
            if (known := self._residents.get(block.key)) is not None:
                self._residents.touch(known)
                return Outcome.OK, 0
            try:
                place = self._take_slot(block, slot_bytes(block.num_tokens, data.nbytes))
            except OSError as error:
                self._rest(error)
                return Outcome.FAILED, 0
        if place is None:
            return Outcome.DROPPED, 0
        segment, slot = place
        try:
            written = segment.write(slot, block, data)
        except OSError as error:
            self._rest(error)
            with self._lock:
                segment.free.append(slot)
            return Outcome.FAILED, 0
        with self._lock:
            return self._commit(block, place, data.nbytes), written

    def _commit(self, block: BlockMeta, place: Place, payload_bytes: int) -> Outcome:
        segment, slot = place
        if block.key in self._residents:  # another thread was faster
            segment.free.append(slot)
            return Outcome.OK
        entry = Entry(block.key, block.parent, block.depth, place, self._residents.tick())
        try:
            now = int(self._wall_clock())
            segment.commit(slot, block, payload_bytes, stored_at=now, last_used=entry.last_used)
        except OSError as error:
            self._rest(error)
            segment.free.append(slot)
            return Outcome.FAILED
        self._residents.add(entry)
        return Outcome.OK

    def _take_slot(self, block: BlockMeta, size: int) -> Place | None:
        """A slot to write, its record wiped. None: there is none and none may be made. Raises OSError."""
        while True:
            for segment in self._segments:
                if segment.free and segment.slot_size == size and segment.space.digest == block.space.digest:
                    return Place(segment, segment.free.popleft())
            if self._grow(block, size):
                continue
            victim = self._residents.make_room(block, orphans=self._keeps_orphans)
            if victim is None:
                return None
            segment, slot = victim.place
            segment.wipe(slot)
            self._counters.evicted(1)
            if segment.slot_size == size and segment.space.digest == block.space.digest:
                return Place(segment, slot)
            segment.free.append(slot)
            if not self._give_up(segment):
                return None

    def _grow(self, block: BlockMeta, size: int) -> bool:
        """Make a segment for such blocks. False: the limit leaves no room for one. Raises OSError."""
        left = self.limit_bytes - self.used_bytes
        part = min(self.limit_bytes // _FEWEST_SEGMENTS, _USUAL_SEGMENT)
        wanted = max(self.limit_bytes // _MOST_SEGMENTS, part, file_bytes(size, 1))
        count = slots_that_fit(size, min(left, wanted))
        if count < 1:
            return False
        self._segments.append(Segment.create(next_path(self.directory, self._segments), block.space, size, count))
        return True

    def _give_up(self, segment: Segment) -> bool:
        """Drop a whole segment so that another kind of block gets its bytes. False while somebody reads it."""
        entries = [entry for entry in self._residents.entries() if entry.place.segment is segment]
        if any(entry.pins for entry in entries) or len(entries) + len(segment.free) < segment.num_slots:
            return False
        for entry in entries:
            self._residents.remove(entry)
        self._counters.evicted(len(entries))
        self._segments.remove(segment)
        segment.delete()
        return True

    def _rest(self, error: OSError) -> None:
        """Write nothing for a while: the device is full, broken or read-only. What is there is still read."""
        self._off = error.strerror or str(error)
        self._off_until = self._clock() + _REST_SECONDS
        log.warning("%s: %s; nothing is stored there for %.0f s", self.directory, self._off, _REST_SECONDS)

    # Starting

    def _recover(self) -> None:
        self._segments, removed = open_segments(self.directory)
        self._counters.removed(removed)
        found: list[DiskEntry] = []
        newest: dict[Segment, int] = {}
        for segment in self._segments:
            latest = 0
            for slot, record in enumerate(segment.records()):
                if record is None:
                    segment.free.append(slot)
                else:
                    used = record.last_used
                    found.append(Entry(record.key, record.parent, record.depth, Place(segment, slot), used))
                    latest = max(latest, used)
            newest[segment] = latest
        dropped = self._shrink(newest)
        found.sort(key=attrgetter("last_used"), reverse=True)
        self._residents.clock = found[0].last_used if found else 0
        for entry in found:
            if entry.place.segment in dropped:
                continue
            if entry.hash in self._residents:  # the newest of two with one key stays
                self._forget_double(entry)
            else:
                self._residents.add(entry)

    def _shrink(self, newest: dict[Segment, int]) -> set[Segment]:
        """Delete the segments used longest ago until the rest keeps the limit, which may be lower than last time."""
        dropped: set[Segment] = set()
        for segment in sorted(self._segments, key=lambda segment: newest[segment]):
            if self.used_bytes <= self.limit_bytes:
                break
            self._segments.remove(segment)
            segment.delete()
            dropped.add(segment)
        return dropped

    @staticmethod
    def _forget_double(entry: DiskEntry) -> None:
        segment, slot = entry.place
        segment.wipe(slot)
        segment.free.append(slot)
