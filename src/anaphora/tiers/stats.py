"""Counting what a tier does, from several threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock

from anaphora.tiers.store import Outcome, TierStats

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
