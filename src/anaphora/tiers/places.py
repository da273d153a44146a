"""Where the disk tier keeps its blocks: slots of segments, and which of them one call can reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from anaphora.tiers.directory import lock_bytes, next_path
from anaphora.tiers.residents import Entry
from anaphora.tiers.segment import Segment, file_bytes, slots_that_fit
from anaphora.tiers.store import Space

_USUAL_SEGMENT = 64 << 20
_FEWEST_SEGMENTS, _MOST_SEGMENTS = 8, 64
"""A limit is cut into about so many files: small enough to give one up for another model, few enough to keep open."""
CALL_BYTES = 4 << 20
"""At most so much is written or read in one call: larger ones are no faster, and hold the device for longer."""


class Place(NamedTuple):
    segment: Segment
    slot: int


DiskEntry = Entry[Place]


def order(place: Place) -> tuple[int, int]:
    """Sorts neighbours beside each other."""
    return id(place.segment), place.slot


def runs(places: Sequence[Place]) -> Iterator[slice]:
    """The parts of ordered places that lie side by side in one segment, a call's worth at most."""
    start = 0
    for stop in range(1, len(places) + 1):
        segment, slot = places[stop - 1]
        full = (stop - start + 1) * segment.slot_size > CALL_BYTES
        if full or stop == len(places) or places[stop] != (segment, slot + 1):
            yield slice(start, stop)
            start = stop


class Slots:
    """The segments of a folder, all files of it together below the limit. Not thread-safe: the tier holds a lock."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.segments: list[Segment] = []
        self._directory = directory
        self._limit = limit_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all files of the folder."""
        return lock_bytes() + sum(segment.file_bytes for segment in self.segments)

    def take(self, space: Space, size: int) -> Place | None:
        """A free slot, of a new segment if need be. None: the limit leaves no room for one. Raises OSError."""
        while True:
            for segment in self.segments:
                if segment.free and segment.suits(space, size):
                    return Place(segment, segment.free.popleft())
            if not self._grow(space, size):
                return None

    def delete(self, segment: Segment) -> None:
        """Give a segment up, and what is in it. Raises OSError."""
        self.segments.remove(segment)
        segment.delete()

    def close(self) -> None:
        for segment in self.segments:
            segment.close()
        self.segments = []

    def _grow(self, space: Space, size: int) -> bool:
        left = self._limit - self.used_bytes
        part = min(self._limit // _FEWEST_SEGMENTS, _USUAL_SEGMENT)
        wanted = max(self._limit // _MOST_SEGMENTS, part, file_bytes(size, 1))
        count = slots_that_fit(size, min(left, wanted))
        if count < 1:
            return False
        self.segments.append(Segment.create(next_path(self._directory, self.segments), space, size, count))
        return True
