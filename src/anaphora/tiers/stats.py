"""What a tier counted since it was opened. Plain numbers; the server makes metrics of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock

from anaphora.tiers.store import Outcome


@dataclass(slots=True)
class TierStats:
    """Blocks unless it says otherwise. `hits` .. `failed` are of loads; saves have their own."""

    limit_bytes: int = 0
    """What the tier may take in all; 0: it does not know."""
    used_bytes: int = 0
    """What it takes now, its own tables included."""
    blocks: int = 0
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    """Found but not as stored; each became a miss and was removed."""
    failed: int = 0
    """Loads that an error of the device, the network or the store ended."""
    bytes_loaded: int = 0
    load_seconds: float = 0.0
    """Summed over the threads that loaded."""
    saved: int = 0
    dropped: int = 0
    """Saves refused: no room that may be made, too large, or the tier is off."""
    save_failed: int = 0
    bytes_saved: int = 0
    save_seconds: float = 0.0
    evicted: int = 0
    off: str = ""
    """Why the tier takes nothing now; empty: it does."""


_LOADED = {Outcome.OK: "hits", Outcome.MISS: "misses", Outcome.CORRUPT: "corrupt"}


class Counters:
    """TierStats that several threads add to."""

    def __init__(self, limit_bytes: int = 0) -> None:
        self._lock = Lock()
        self._stats = TierStats(limit_bytes=limit_bytes)

    def loaded(self, outcomes: Sequence[Outcome], sizes: Sequence[int], seconds: float) -> None:
        with self._lock:
            stats = self._stats
            for outcome, size in zip(outcomes, sizes, strict=True):
                name = _LOADED.get(outcome, "failed")
                setattr(stats, name, getattr(stats, name) + 1)
                stats.bytes_loaded += size if outcome is Outcome.OK else 0
            stats.load_seconds += seconds

    def saved(self, outcomes: Sequence[Outcome], written: int, seconds: float) -> None:
        """`written`: bytes that really were, blocks that were there before left out."""
        with self._lock:
            stats = self._stats
            stats.saved += sum(outcome is Outcome.OK for outcome in outcomes)
            stats.dropped += sum(outcome is Outcome.DROPPED for outcome in outcomes)
            stats.save_failed += sum(outcome is Outcome.FAILED for outcome in outcomes)
            stats.bytes_saved += written
            stats.save_seconds += seconds

    def removed(self, count: int) -> None:
        """Whole files that were found damaged."""
        with self._lock:
            self._stats.corrupt += count

    def evicted(self, count: int) -> None:
        with self._lock:
            self._stats.evicted += count

    def snapshot(self, *, used_bytes: int, blocks: int, off: str = "") -> TierStats:
        with self._lock:
            return replace(self._stats, used_bytes=used_bytes, blocks=blocks, off=off)
