"""The start of a disk tier: its index from the segments' tables. No block is read."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from anaphora.tiers.directory import lock_bytes, open_segments
from anaphora.tiers.places import DiskEntry, Place
from anaphora.tiers.residents import Entry
from anaphora.tiers.segment import Segment


def recover(directory: Path, limit_bytes: int) -> tuple[list[Segment], list[DiskEntry], int]:
    """Under the folder's lock: the segments, their blocks used longest ago first, and how many files were removed.

    State changes: what is unfinished, damaged or beyond the limit is deleted. Raises OSError.
    """
    segments, removed = open_segments(directory)
    tables = {segment: _entries(segment) for segment in segments}
    for segment in _too_many(tables, limit_bytes - lock_bytes()):
        segment.delete()
        segments.remove(segment)
        del tables[segment]
    newest: dict[bytes, DiskEntry] = {}
    for entry in sorted((entry for entries in tables.values() for entry in entries), key=attrgetter("last_used")):
        if (double := newest.pop(entry.hash, None)) is not None:
            double.place.segment.wipe(double.place.slot)
            double.place.segment.free.append(double.place.slot)
        newest[entry.hash] = entry
    return segments, list(newest.values()), removed


def _entries(segment: Segment) -> list[DiskEntry]:
    """State changes: the segment's free slots."""
    entries = []
    for slot, record in enumerate(segment.records()):
        if record is None:
            segment.free.append(slot)
        else:
            _, key, parent, _, _, depth, _, last_used = record
            entries.append(Entry(key, parent, depth, Place(segment, slot), last_used))
    return entries


def _too_many(tables: dict[Segment, list[DiskEntry]], room: int) -> Sequence[Segment]:
    """Those needed longest ago, until the rest has room: the limit may be lower than last time.

    A block is needed when it or a block behind it is used, and of segments needed last at the same time the one
    whose blocks lie deepest goes: blocks are of no use without those before them.
    """
    used = sum(segment.file_bytes for segment in tables)
    if used <= room:
        return []
    needed: dict[bytes, int] = {}
    every = (entry for entries in tables.values() for entry in entries)
    for entry in sorted(every, key=attrgetter("depth"), reverse=True):  # children first
        needed[entry.hash] = max(needed.get(entry.hash, 0), entry.last_used)
        needed[entry.parent] = max(needed.get(entry.parent, 0), needed[entry.hash])

    def worth(segment: Segment) -> tuple[int, int]:
        entries = tables[segment]
        return (
            max((needed[entry.hash] for entry in entries), default=0),
            -min((entry.depth for entry in entries), default=0),
        )

    dropped = []
    for segment in sorted(tables, key=worth):
        if used <= room:
            break
        used -= segment.file_bytes
        dropped.append(segment)
    return dropped
