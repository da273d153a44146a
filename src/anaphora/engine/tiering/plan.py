"""What of a prompt lies in the tiers, and how far to load it. Depths are counted in blocks from the prompt's start.

depth        0 .. start      start .. reach             reach .. stop
             in the pool     in the tiers, every        some group lacks what it must see
                             group that must see it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anaphora.blocks.hashing import HashChain
from anaphora.blocks.matching import first_visible
from anaphora.tiers.break_even import Run
from anaphora.tiers.hierarchy import Hierarchy
from anaphora.tiers.store import group_key
from anaphora.tiers.transfers import NOWHERE, Lookup


@dataclass(slots=True)
class Found:
    """The tiers' answer about blocks start .. stop of one chain, in every cache group."""

    windows: tuple[int | None, ...]
    block_size: int
    start: int
    stop: int
    lookup: Lookup

    def place(self, group: int, depth: int) -> int:
        """The tier that has the block, or NOWHERE."""
        return self.lookup.places[group * (self.stop - self.start) + depth - self.start]

    def moved(self, group: int, depth: int, place: int) -> None:
        """The block can be had from another tier now."""
        self.lookup.places[group * (self.stop - self.start) + depth - self.start] = place

    def reach(self, start: int, at_most: int) -> int:
        """The greatest depth that can be loaded to when the pool has `start` blocks; `start` when there is none."""
        whole = at_most
        for group, window in enumerate(self.windows):
            if window is None:
                whole = next((d for d in range(start, whole) if self.place(group, d) == NOWHERE), whole)
        depth = whole
        while depth > start and (gap := self._highest_gap(start, depth)) >= 0:
            depth = gap
        return max(depth, start)

    def wanted(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(group, depth) of the blocks to load so that a request can go on at `stop`; parents before children."""
        firsts = [max(start, first_visible(stop * self.block_size, w, self.block_size)) for w in self.windows]
        return [(g, d) for d in range(start, stop) for g, first in enumerate(firsts) if d >= first]

    def runs(self, start: int, stop: int, block_bytes: int) -> list[Run]:
        """The way from `start` to `stop` by tier: a depth lies where its slowest block does."""
        where: dict[int, list[int]] = {}
        for group, depth in self.wanted(start, stop):
            where.setdefault(depth, []).append(self.place(group, depth))
        runs: list[Run] = []
        skipped = 0
        for depth in range(start, stop):
            places = where.get(depth)
            if places is None:  # no group has to see it: it comes for nothing, with the next that is seen
                skipped += 1
                continue
            tier, new = (
                max(places),
                Run(max(places), 1 + skipped, self.block_size * (1 + skipped), block_bytes * len(places)),
            )
            skipped = 0
            if runs and runs[-1].tier == tier:
                last = runs.pop()
                new = Run(tier, last.blocks + new.blocks, last.tokens + new.tokens, last.nbytes + new.nbytes)
            runs.append(new)
        return runs

    def _highest_gap(self, start: int, depth: int) -> int:
        """The deepest block that a window must see at `depth` and no tier has; -1 if none."""
        gap = -1
        for group, window in enumerate(self.windows):
            if window is not None:
                first = max(start, first_visible(depth * self.block_size, window, self.block_size), gap + 1)
                gap = next((d for d in range(depth - 1, first - 1, -1) if self.place(group, d) == NOWHERE), gap)
        return gap


def ask(hierarchy: Hierarchy, windows: Sequence[int | None], chain: HashChain, start: int, stop: int) -> Found:
    """One question about all blocks start .. stop of a chain; `lookup.done` says whether everybody answered."""
    keys = [group_key(digest, group) for group in range(len(windows)) for digest in chain.hashes[start:stop]]
    return Found(tuple(windows), chain.block_size, start, stop, hierarchy.lookup(keys))
