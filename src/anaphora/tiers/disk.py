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
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from anaphora.blocks.eviction import EvictionPolicy
from anaphora.errors import ConfigError
from anaphora.tiers.directory import DirectoryLock, lock_bytes, unusable
from anaphora.tiers.format import CorruptBlock
from anaphora.tiers.memory import PAGE
from anaphora.tiers.places import CALL_BYTES, DiskEntry, Place, Slots, order, runs
from anaphora.tiers.record import FREE, pack_record
from anaphora.tiers.recovery import recover
from anaphora.tiers.residents import Entry, Residents
from anaphora.tiers.segment import Segment, file_bytes, slot_bytes
from anaphora.tiers.stats import Counters
from anaphora.tiers.store import BlockMeta, Outcome, TierStats

log = logging.getLogger(__name__)
_REST_SECONDS = 30.0
"""How long nothing is written after the device refused a write."""


@dataclass(slots=True)
class _Coming:
    """Blocks of a save that have their slots: wiped, and nobody else's."""

    indices: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    parents: list[DiskEntry] = field(default_factory=list)
    """Pinned until their children are here."""


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
            raise ConfigError(
                f"a disk cache of {limit_bytes:,} bytes holds no block; give --disk-cache (an import: --limit) more"
            )
        self._keeps_orphans = keeps_orphans
        self._wall_clock = wall_clock
        self._clock = clock
        self._residents: Residents[Place] = Residents(policy)
        self._unnoted: dict[DiskEntry, None] = {}
        """Used, and the tables do not say so yet."""
        self._counters = Counters(limit_bytes)
        self._lock = Lock()
        self._off, self._off_until = "", 0.0
        self._slots = Slots(directory, limit_bytes)
        self._held = DirectoryLock(directory)
        try:
            self._slots.segments, entries, removed = recover(directory, limit_bytes)
            self._counters.removed(removed)
            self._residents.restore(entries)
        except OSError as error:
            self.close()
            raise unusable(directory, error) from error

    @property
    def used_bytes(self) -> int:
        """Bytes of all files of the folder."""
        return self._slots.used_bytes

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._residents.contains(keys)

    def load(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        start, reasons = time.perf_counter(), list[str]()
        outcomes = [Outcome.MISS] * len(blocks)
        found = self._find(blocks)
        for run in runs([entry.place for _, entry in found]):
            which = [i for i, _ in found[run]]
            come = self._read(found[run][0][1].place, [blocks[i] for i in which], [into[i] for i in which], reasons)
            for i, outcome in zip(which, come, strict=True):
                outcomes[i] = outcome
        with self._lock:
            for i, entry in found:
                if outcomes[i] is Outcome.OK:
                    self._unnoted[entry] = None
                else:
                    self._forget(entry)
                self._unpin(entry)
        if reasons:  # one line, however many there are
            log.warning("%d blocks of %s are removed: %s", len(reasons), self.directory, reasons[0])
        self._counters.loaded(outcomes, [view.nbytes for view in into], time.perf_counter() - start)
        return outcomes

    def save(self, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> list[Outcome]:
        start, written, done = time.perf_counter(), 0, 0
        outcomes = [Outcome.DROPPED] * len(blocks)
        while done < len(blocks):
            coming, done = self._take_slots(blocks, data, done, outcomes)
            written += self._write(coming, blocks, data, outcomes)
        self._note_uses()
        self._counters.saved(outcomes, written, time.perf_counter() - start)
        return outcomes

    def discard(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                if (entry := self._residents.get(key)) is not None:
                    self._forget(entry)

    def used(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                if (entry := self._residents.get(key)) is not None:
                    self._residents.touch(entry)
                    self._unnoted[entry] = None
        self._note_uses()

    def stats(self) -> TierStats:
        off = self._off if self._clock() < self._off_until else ""
        return self._counters.snapshot(used_bytes=self.used_bytes, blocks=len(self._residents), off=off)

    def check_invariants(self) -> None:
        """Raises BlockStateError when entries or slots are lost or counted twice. For a moment without readers."""
        with self._lock:
            self._residents.check_invariants()
            free = sum(len(segment.free) for segment in self._slots.segments)
            slots = sum(segment.num_slots for segment in self._slots.segments)
            assert free + len(self._residents) == slots, "slots of the disk tier are lost"
            assert self.used_bytes <= self.limit_bytes, "the disk tier is larger than its limit"

    def close(self) -> None:
        self._note_uses()
        self._slots.close()
        self._held.close()

    # Loading

    def _find(self, blocks: Sequence[BlockMeta]) -> list[tuple[int, DiskEntry]]:
        """Those that are here, by their index, in the order of their places. State changes: used, and pinned."""
        found = []
        with self._lock:
            for i, block in enumerate(blocks):
                if (entry := self._residents.get(block.key)) is not None:
                    self._residents.pin(entry)
                    self._residents.touch(entry)
                    found.append((i, entry))
        return sorted(found, key=lambda each: order(each[1].place))

    def _read(
        self, place: Place, blocks: Sequence[BlockMeta], into: Sequence[memoryview], reasons: list[str]
    ) -> list[Outcome]:
        """Neighbours from `place` on, in one call; one by one when that fails, so that a bad one costs only itself."""
        segment, slot = place
        try:
            whole = segment.read(slot, blocks, into)
        except (CorruptBlock, OSError) as error:
            if len(blocks) > 1:
                alone = [(Place(segment, slot + i), [blocks[i]], [into[i]]) for i in range(len(blocks))]
                return [self._read(*each, reasons)[0] for each in alone]
            why = error.strerror if isinstance(error, OSError) else error
            reasons.append(f"{segment.path.name}, slot {slot}: {why}")
            return [Outcome.FAILED if isinstance(error, OSError) else Outcome.CORRUPT]
        for i, good in enumerate(whole, slot):
            if not good:
                reasons.append(f"{segment.path.name}, slot {i}: not the bytes that were stored, or of other tokens")
        return [Outcome.OK if good else Outcome.CORRUPT for good in whole]

    def _note_uses(self) -> None:
        """Let the age of what was used survive a restart. Not between reads, which a write holds up."""
        with self._lock:
            entries = [entry for entry in self._unnoted if self._residents.get(entry.hash) is entry]
            self._unnoted.clear()
            for entry in entries:
                self._residents.pin(entry)
        for entry in entries:
            with suppress(OSError):  # not worth a miss
                entry.place.segment.touch(entry.place.slot, entry.last_used)
        with self._lock:
            for entry in entries:
                self._unpin(entry)

    def _unpin(self, entry: DiskEntry) -> None:
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

    def _take_slots(
        self, blocks: Sequence[BlockMeta], data: Sequence[memoryview], start: int, outcomes: list[Outcome]
    ) -> tuple[_Coming, int]:
        """Slots for equal blocks from `start` on, a call's worth at most; where to go on.

        A block that finds no room waits until those before it are here: it may push one of them out.
        """
        coming, keys = _Coming(), set[bytes]()
        first, length = blocks[start], data[start].nbytes
        size = slot_bytes(first.num_tokens, length)
        most = start + max(1, CALL_BYTES // size)
        with self._lock:
            for i in range(start, len(blocks)):
                block = blocks[i]
                alike = data[i].nbytes == length and len(block.tokens) == len(first.tokens)
                if i == most or not alike or block.space.digest != first.space.digest:
                    return coming, i
                if (known := self._residents.get(block.key)) is not None:
                    self._residents.touch(known)
                    outcomes[i] = Outcome.OK
                    continue
                if self._clock() < self._off_until:
                    continue
                try:
                    place = self._take_slot(block, size, orphans=self._keeps_orphans or block.parent in keys)
                except OSError as error:
                    self._rest(error)
                    outcomes[i] = Outcome.FAILED
                    continue
                if place is None and coming.places:
                    return coming, i
                if place is not None:
                    keys.add(block.key)
                    coming.places.append(place)
                    coming.indices.append(i)
                    if (parent := self._residents.get(block.parent)) is not None:
                        self._residents.pin(parent)  # not to go before its child is here
                        coming.parents.append(parent)
        return coming, len(blocks)

    def _write(
        self, coming: _Coming, blocks: Sequence[BlockMeta], data: Sequence[memoryview], outcomes: list[Outcome]
    ) -> int:
        """Fill the slots, neighbours together, and commit them. Bytes written."""
        written = 0
        places = sorted(coming.places, key=order)  # whatever order slots became free in, chains lie in theirs
        for run in runs(places):
            which = coming.indices[run]
            wanted, payloads = [blocks[i] for i in which], [data[i] for i in which]
            outcome = Outcome.DROPPED
            if self._clock() >= self._off_until:
                outcome, size = self._write_run(places[run][0], wanted, payloads)
                written += size
            if outcome is not Outcome.OK:
                with self._lock:
                    places[run][0].segment.free.extend(place.slot for place in places[run])
            for i in which:
                outcomes[i] = outcome
        with self._lock:
            for parent in coming.parents:
                self._unpin(parent)
        return written

    def _write_run(self, place: Place, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> tuple[Outcome, int]:
        segment, slot = place
        try:
            written = segment.write(slot, blocks, data)
            with self._lock:
                self._commit(segment, slot, blocks, data)
        except OSError as error:
            self._rest(error)
            return Outcome.FAILED, 0
        return Outcome.OK, written

    def _commit(self, segment: Segment, first: int, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> None:
        """Blocks that another thread stored meanwhile give their slots back. Raises OSError: nothing changed."""
        now, records, entries, spare = int(self._wall_clock()), [], dict[bytes, DiskEntry](), []
        for slot, (block, view) in enumerate(zip(blocks, data, strict=True), first):
            if block.key in self._residents or block.key in entries:
                spare.append(slot)
                records.append(FREE)
                continue
            used = self._residents.tick()
            entries[block.key] = Entry(block.key, block.parent, block.depth, Place(segment, slot), used)
            records.append(pack_record(slot, block, view.nbytes, stored_at=now, last_used=used))
        segment.commit(first, records)
        segment.free.extend(spare)
        for entry in entries.values():
            self._residents.add(entry)

    def _take_slot(self, block: BlockMeta, size: int, *, orphans: bool) -> Place | None:
        """A slot to write, its record wiped. None: there is none and none may be made. Raises OSError."""
        while (place := self._slots.take(block.space, size)) is None:
            victim = self._residents.make_room(block, orphans=orphans)
            if victim is None:
                return None
            segment, slot = victim.place
            segment.free.append(slot)
            self._counters.evicted(1)
            segment.wipe(slot)
            if not segment.suits(block.space, size) and not self._give_up(segment):
                return None
        return place

    def _give_up(self, segment: Segment) -> bool:
        """Drop a whole segment so that another kind of block gets its bytes. False while somebody reads it."""
        entries = [entry for entry in self._residents.entries() if entry.place.segment is segment]
        if any(entry.pins for entry in entries) or len(entries) + len(segment.free) < segment.num_slots:
            return False
        for entry in entries:
            self._residents.remove(entry)
        self._counters.evicted(len(entries))
        self._slots.delete(segment)
        return True

    def _rest(self, error: OSError) -> None:
        """Write nothing for a while: the device is full, broken or read-only. What is there is still read."""
        self._off = error.strerror or str(error)
        self._off_until = self._clock() + _REST_SECONDS
        log.warning("%s: %s; nothing is stored there for %.0f s", self.directory, self._off, _REST_SECONDS)
