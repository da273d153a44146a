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
    """Those used longest ago, until the rest has room: the limit may be lower than last time."""
    used = sum(segment.file_bytes for segment in tables)
    dropped = []
    for segment in sorted(tables, key=lambda each: max((entry.last_used for entry in tables[each]), default=0)):
        if used <= room:
            break
        used -= segment.file_bytes
        dropped.append(segment)
    return dropped
