"""Hits of LRU at every pool size, exactly, in one pass over the trace (Mattson et al. 1970, for prefixes).

A block hits in a pool of C blocks when fewer than C others were used since its last use. A prompt is used tail
first, so a parent is always more recent than its child, and what one prompt used last stays one piece on the stack:

    prompt 7 was   a b c d e f         prompt 9 is  a b c x y
    segment 7 keeps      d e f         segment 9    a b c x y      recent <- 9 9 9 9 9 8 8 7 7 7 -> old

So distances are counted per segment, with a Fenwick tree over segments, and a block costs a dictionary lookup.
Equal to the server's pool under LRU, which the tests prove.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby, pairwise

from anaphora.replay.readers.base import TraceRequest


class _Segment:
    """What a prompt used and no later one did: the blocks of its path from depth `start` on."""

    __slots__ = ("blocks", "place", "start")

    def __init__(self, blocks: Sequence[Hashable], place: int) -> None:
        self.blocks = blocks
        self.place = place
        self.start = 0


class LRUCurve:
    """Feed it `request`s, then ask `hits` for any size up to `max_blocks` (None: any size at all).

    Memory grows with max_blocks; without, with the trace's different blocks.
    """

    def __init__(self, max_blocks: int | None = None) -> None:
        self.max_blocks = max_blocks
        self.requests = self.blocks = self.tokens = 0
        self._owner: dict[Hashable, _Segment] = {}
        self._segments: deque[_Segment] = deque()
        self._live = 0
        self._tree = [0] * 1025
        self._next_place = 1
        self._blocks_at: dict[int, int] = {}
        """Stack distance -> change of the number of blocks that hit at exactly that distance; running sums count."""
        self._tokens_at: dict[int, int] = {}

    def request(self, blocks: Sequence[Hashable], block_size: int = 1, num_tokens: int | None = None) -> None:
        """One prompt: the names of its blocks, of block_size tokens each (the last may be partial)."""
        tokens = len(blocks) * block_size if num_tokens is None else num_tokens
        self.requests += 1
        self.blocks += len(blocks)
        self.tokens += tokens
        moved = []
        depth = 0
        for segment, run in groupby(map(self._owner.get, blocks)):
            if segment is None:
                break
            count = sum(1 for _ in run)
            newer = self._live - self._sum(segment.place)
            missing = max(0, (depth + count) * block_size - tokens)  # of a partial last block
            self._count(newer, count, block_size, missing)
            moved.append((segment, count))
            depth += count
        for segment, count in moved:
            segment.start += count
            self._add(segment.place, -count)
        self._live += len(blocks) - depth
        if blocks:
            self._push(blocks)
        if self.max_blocks is not None:
            self._forget_beyond(self.max_blocks)

    def hits(self, num_blocks: int) -> tuple[int, int]:
        """(blocks, tokens) that hit in a pool of num_blocks. Raises ValueError beyond max_blocks."""
        if self.max_blocks is not None and num_blocks > self.max_blocks:
            raise ValueError(f"the curve was counted up to {self.max_blocks} blocks")
        return _below(self._blocks_at, num_blocks), _below(self._tokens_at, num_blocks)

    @property
    def ceiling(self) -> tuple[int, int]:
        """(blocks, tokens) that hit when nothing is ever evicted; without max_blocks."""
        return self.hits(self._live) if self.max_blocks is None else self.hits(self.max_blocks)

    def distances(self) -> list[tuple[int, int, int]]:
        """The histogram of reuse distances: (from, to, blocks that hit at each distance from .. to - 1)."""
        out, level, edges = [], 0, sorted(self._blocks_at)
        for edge, after in pairwise(edges):
            level += self._blocks_at[edge]
            if level:
                out.append((edge, after, level))
        return out

    def _count(self, distance: int, count: int, block_size: int, missing: int) -> None:
        end = distance + count
        for at, change in ((self._blocks_at, 1), (self._tokens_at, block_size)):
            at[distance] = at.get(distance, 0) + change
            at[end] = at.get(end, 0) - change
        if missing:
            self._tokens_at[end - 1] = self._tokens_at.get(end - 1, 0) - missing
            self._tokens_at[end] += missing

    def _push(self, blocks: Sequence[Hashable]) -> None:
        if self._next_place == len(self._tree):
            self._compact()
        segment = _Segment(blocks, self._next_place)
        self._next_place += 1
        self._segments.append(segment)
        self._add(segment.place, len(blocks))
        self._owner.update(dict.fromkeys(blocks, segment))

    def _forget_beyond(self, limit: int) -> None:
        while self._segments:
            oldest = self._segments[0]
            left = len(oldest.blocks) - oldest.start
            if self._live - left < limit:
                return
            self._segments.popleft()
            for block in oldest.blocks[oldest.start :]:
                del self._owner[block]
            self._add(oldest.place, -left)
            self._live -= left

    def _compact(self) -> None:
        """New places, in order, for the segments that still hold something."""
        self._segments = deque(s for s in self._segments if s.start < len(s.blocks))
        self._tree = [0] * max(1025, 2 * len(self._segments) + 1)
        self._next_place = 1
        for segment in self._segments:
            segment.place = self._next_place
            self._next_place += 1
            self._add(segment.place, len(segment.blocks) - segment.start)

    def _add(self, place: int, change: int) -> None:
        tree = self._tree
        while place < len(tree):
            tree[place] += change
            place += place & -place

    def _sum(self, place: int) -> int:
        total, tree = 0, self._tree
        while place:
            total += tree[place]
            place &= place - 1
        return total


def lru_curve(requests: Iterable[TraceRequest], max_blocks: int | None = None, block_size: int = 16) -> LRUCurve:
    """The curve of a trace. `block_size`: of traces that hold token ids; their partial last blocks do not count."""
    curve = LRUCurve(max_blocks)
    for request in requests:
        named: Sequence[Hashable] = (
            request.hash_ids if request.hash_ids is not None and not request.salt else (request.blocks(block_size))
        )
        size = request.block_size or block_size
        curve.request(named, size, min(request.input_length, len(named) * size))
    return curve


def _below(changes: dict[int, int], stop: int) -> int:
    """Sum over distances 0 .. stop - 1 of the running sums of the changes."""
    return sum(change * (stop - at) for at, change in changes.items() if at < stop)
