"""What a trace is like, whatever the cache: who comes back, when, how deep, and what is shared most.

One pass. Memory grows with the trace's different blocks (to know that one came back it must be remembered).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that several prompts began with; no longer one was used as often."""

    uses: int
    blocks: int
    last_block: Hashable
    """Its name: the hash id of its last block."""


@dataclass(slots=True)
class _Seen:
    """A block: its last use and how often, and the same of what it follows."""

    parent: Hashable | None
    depth: int
    last: float
    uses: int = 1


class TraceProfile:
    """Feed it `request`s in order of arrival."""

    def __init__(self) -> None:
        self.requests = self.blocks = 0
        self.reuse_seconds: dict[float, int] = {}
        """Seconds since a block's last use -> how many block uses came after just that."""
        self.by_depth: dict[int, tuple[int, int]] = {}
        """Depth in blocks -> (block uses, of those not the first of their block)."""
        self._seen: dict[Hashable, _Seen] = {}
        self._first = self._last = 0.0

    @property
    def unique_blocks(self) -> int:
        return len(self._seen)

    def request(self, blocks: Sequence[Hashable], arrival: float) -> None:
        """One prompt's block names, and seconds."""
        self._first = arrival if not self.requests else self._first
        self._last = arrival
        self.requests += 1
        self.blocks += len(blocks)
        parent: Hashable | None = None
        for depth, block in enumerate(blocks):
            used, again = self.by_depth.get(depth, (0, 0))
            seen = self._seen.get(block)
            if seen is None:
                self._seen[block] = _Seen(parent, depth, arrival)
            else:
                again += 1
                gap = arrival - seen.last
                self.reuse_seconds[gap] = self.reuse_seconds.get(gap, 0) + 1
                seen.last = arrival
                seen.uses += 1
            self.by_depth[depth] = used + 1, again
            parent = block

    def working_set(self, seconds: float) -> float:
        """Different blocks used in a window of that length, on average (Denning 1968).

        A use keeps its block in the window for `seconds`, or until the next use: summed and divided by the time.
        """
        span = self._last - self._first
        if not span:
            return float(len(self._seen))
        covered = sum(min(gap, seconds) * count for gap, count in self.reuse_seconds.items())
        covered += sum(min(seconds, self._last - seen.last) for seen in self._seen.values())
        return covered / span

    def top_prefixes(self, count: int) -> list[SharedPrefix]:
        """The prefixes that saved, or could have saved, the most blocks: (uses - 1) x blocks."""
        goes_on = {seen.parent for seen in self._seen.values() if self._is_used_like_its_parent(seen)}
        ends = [
            SharedPrefix(seen.uses, seen.depth + 1, block)
            for block, seen in self._seen.items()
            if seen.uses > 1 and block not in goes_on
        ]
        return sorted(ends, key=lambda p: (-(p.uses - 1) * p.blocks, p.blocks))[:count]

    def _is_used_like_its_parent(self, seen: _Seen) -> bool:
        return seen.parent is not None and self._seen[seen.parent].uses == seen.uses
