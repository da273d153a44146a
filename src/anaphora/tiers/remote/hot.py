"""Which blocks are read from the shared store so often that a copy should stay here.

A prefix that everybody uses lives on one node of the store, and every server asks that node for it (TokenLake,
arXiv 2508.17219, balances such heavy hitters by replication). Here each server keeps its own copy of what it reads
often: counting costs a fixed 256 KiB, whatever the number of keys. A count-min sketch with conservative update (Estan
and Varghese, 2002) never counts too few; halving all counts after every `window` reads forgets old fame, as TinyLFU
does (Einziger et al., arXiv 1512.00727).
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence

ROWS = 4
WIDTH = 1 << 16
"""Counters of one row, a byte each."""
_TOP = 255
_HALVES = bytes(count // 2 for count in range(_TOP + 1))
_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)


class HotKeys:
    """Counts reads of 16-byte keys; thread-safe."""

    def __init__(self, *, threshold: int = 3, window: int = 2 * WIDTH) -> None:
        """A key is hot from its `threshold`-th read (at most 255), counts fading by half every `window` reads."""
        self._threshold = threshold
        self._window = window
        self._rows = [bytearray(WIDTH) for _ in range(ROWS)]
        self._reads = 0
        self._lock = threading.Lock()

    def count(self, keys: Sequence[bytes]) -> list[bool]:
        """Count one read of each key; the answer says which of them are hot now."""
        with self._lock:
            return [self._count(key) >= self._threshold for key in keys]

    def _count(self, key: bytes) -> int:
        # Keys are digests already, but those of one prefix's cache groups differ in the last two bytes only:
        # the last word is stirred into every row.
        words: tuple[int, ...] = struct.unpack("<4I", key)
        places = [((word ^ words[3]) * odd & 0xFFFFFFFF) >> 16 for word, odd in zip(words[:3], _ODD, strict=False)]
        places.append((words[3] * _ODD[3] & 0xFFFFFFFF) >> 16)
        seen = min(row[place] for row, place in zip(self._rows, places, strict=True))
        if seen < _TOP:
            for row, place in zip(self._rows, places, strict=True):
                if row[place] == seen:
                    row[place] = seen + 1
        self._reads += 1
        if self._reads >= self._window:
            self._reads = 0
            self._rows = [row.translate(_HALVES) for row in self._rows]
        return min(seen + 1, _TOP)
