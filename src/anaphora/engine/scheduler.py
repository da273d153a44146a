"""Decides what runs next. One rule: a request catches up from num_computed_tokens to its length.

Prefill, chunked prefill, decode and resumption after preemption are all that rule. Requests are served in
order of arrival; when blocks run out, the youngest running request gives its up, so the oldest always finishes.
Torch-free.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Collection
from contextlib import suppress

from anaphora.blocks.manager import BlockTable, KVCacheManager, PrefixMatch
from anaphora.engine.batch import Batch, BatchRow
from anaphora.engine.offload import NoOffload, Offload
from anaphora.engine.request import Request, Status
from anaphora.errors import OutOfBlocks
from anaphora.types import BlockCopy, BlockHash, RequestId


def _by_arrival(request: Request) -> int:
    return request.arrival


class Scheduler:
    """Owns the waiting and running lists and asks the cache for blocks. Not thread-safe."""

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        offload: Offload | None = None,
    ) -> None:
        """`offload`: the tiers behind the pool, if there are any."""
        self._cache = cache
        self._offload = offload or NoOffload()
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.requests: dict[RequestId, Request] = {}
        self.preemptions = 0
        self.just_admitted: list[Request] = []
        """Requests that the last `schedule` admitted for the first time."""
        self.serving = RequestId("")
        """The request that blocks were last taken for."""

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=_by_arrival)
        self._offload.arrived(request)

    def schedule(self) -> Batch:
        """Choose the next step's work. Pins and allocates blocks; may preempt. An empty batch means nothing to do."""
        self.just_admitted = []
        self._offload.poll()
        preemptions = self.preemptions
        rows = self._continue_running()
        copies: list[BlockCopy] = []
        if self.preemptions == preemptions:
            self._admit(rows, copies)
        return Batch(tuple(rows.values()), tuple(copies))

    def update(self, batch: Batch) -> None:
        """The batch was computed: advance its requests, make whole blocks findable, drop what windows passed."""
        self._cache.release_copies(batch.copies)
        for row in batch.rows:
            request = self.requests[row.request_id]
            assert request.table is not None
            request.num_computed_tokens = row.start + len(row.token_ids)
            self._cache.commit(request.table, request.tokens, request.chain, request.num_computed_tokens)
            self._offload.computed(request)
            self._cache.slide(request.table, request.num_computed_tokens)

    def fail(self, batch: Batch) -> list[Request]:
        """The batch could not be computed: forget its requests without making anything findable."""
        failed = [self.requests[row.request_id] for row in batch.rows]
        for request in failed:
            self.finish(request)
        self._cache.release_copies(batch.copies)
        return failed

    def finish(self, request: Request) -> None:
        """Give the request's blocks back (findable as far as computed) and forget it."""
        self._offload.finished(request)
        if request.table is not None:
            self._cache.close(request.table, request.tokens, request.chain, request.num_computed_tokens)
            request.drop_table()
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        request.status = Status.FINISHED
        del self.requests[request.request_id]

    def _continue_running(self) -> dict[RequestId, BatchRow]:
        """Rows for the running requests: those that decode first, so that prefill never holds them up."""
        rows: dict[RequestId, BatchRow] = {}
        budget = self._max_num_batched_tokens
        for request in sorted(self.running, key=lambda r: (r.num_remaining > 1, r.arrival)):
            if request.status is not Status.RUNNING:  # preempted a moment ago
                continue
            count = min(request.num_remaining, budget)
            if count == 0:
                break
            self.serving = request.request_id
            while request.status is Status.RUNNING:
                assert request.table is not None
                try:
                    self._cache.reserve(request.table, request.num_computed_tokens + count)
                except OutOfBlocks:
                    if self._offload.settle():
                        continue
                    row = rows.pop(self._preempt_youngest(), None)
                    budget += len(row.token_ids) if row else 0
                else:
                    rows[request.request_id] = _row(request, count)
                    budget -= count
                    break
        return rows

    def _preempt_youngest(self) -> RequestId:
        victim = max(self.running, key=_by_arrival)
        assert victim.table is not None
        self._offload.preempted(victim)
        self._cache.close(victim.table, victim.tokens, victim.chain, victim.num_computed_tokens)
        victim.drop_table()
        victim.num_computed_tokens = 0
        victim.status = Status.WAITING
        self.running.remove(victim)
        insort(self.waiting, victim, key=_by_arrival)
        self.preemptions += 1
        return victim.request_id

    def _admit(self, rows: dict[RequestId, BatchRow], copies: list[BlockCopy]) -> None:
        """Let waiting requests in, oldest first, while there are sequences, tokens and blocks for them.

        One that waits for what another is computing, or a tier is loading, is passed over, but keeps its place in
        the line: the sequence and the blocks it will want are not given to those behind it.
        """
        budget = self._max_num_batched_tokens - sum(len(row.token_ids) for row in rows.values())
        in_flight: dict[BlockHash, RequestId | None] | None = None
        kept_seqs = kept_blocks = 0
        for request in list(self.waiting):
            if len(self.running) + kept_seqs == self._max_num_seqs:
                break
            if budget == 0 and not self._offload.undecided(request):
                break
            self.serving = request.request_id
            if in_flight is None:
                in_flight = {block: other.request_id for other in self.running for block in self._being_computed(other)}
                in_flight.update(dict.fromkeys(self._offload.in_flight()))
            began = time.monotonic()
            if request.waits_for not in in_flight:
                match = self._cache.match_prefix(request.tokens, request.chain, len(request.tokens) - 1)
                request.waits_for = self._next_block(request, match.num_tokens)
            if request.waits_for is not None and request.waits_for in in_flight:
                request.waited_for = in_flight[request.waits_for] or request.waited_for
                kept_seqs += 1
                kept_blocks += self._own_blocks(request, in_flight)
                continue
            room = self._cache.num_free + self._cache.num_cached - kept_blocks
            if self._offload.fetch(request, match, room):
                in_flight.update(dict.fromkeys(self._offload.in_flight()))
                kept_seqs += 1
                kept_blocks += self._own_blocks(request, in_flight)
                continue
            opened = self._open(request, match, budget, kept_blocks) if budget else None
            if opened is None:
                break
            table, new_copies, match = opened
            request.take_table(table)
            self._start(request, match, time.monotonic() - began)
            row = _row(request, min(request.num_remaining, budget))
            rows[request.request_id] = row
            budget -= len(row.token_ids)
            copies += new_copies
            in_flight.update(dict.fromkeys(self._being_computed(request), request.request_id))

    def _open(
        self, request: Request, match: PrefixMatch, budget: int, kept_blocks: int
    ) -> tuple[BlockTable, list[BlockCopy], PrefixMatch] | None:
        """A table that holds the match (as it is returned) and the first chunk, or None when there are too few blocks.

        While others run, all its present tokens must fit, so that it is not let in only to be preempted; alone,
        the first chunk is enough, for windows free blocks as it goes. A partial block needs its source and its
        copy at once: where that is too much, the whole blocks of the match will do. `kept_blocks` are spoken for.
        """
        length = len(request.tokens)
        whole = match.num_tokens // self._cache.block_size * self._cache.block_size
        for limit in dict.fromkeys((match.num_tokens, whole)):
            if limit != match.num_tokens:
                match = self._cache.match_prefix(request.tokens, request.chain, limit)
            try:
                table, copies = self._cache.open(match)
            except OutOfBlocks:
                continue
            chunk = match.num_tokens + min(length - match.num_tokens, budget)
            needed = self._cache.blocks_needed(table, length if self.running else chunk)
            if needed + kept_blocks <= self._cache.num_free + self._cache.num_cached:
                with suppress(OutOfBlocks):  # what is held for a tier may keep the blocks before it from being evicted
                    self._cache.reserve(table, chunk)
                    return table, copies, match
            self._cache.close(table, request.tokens, request.chain, 0)
            self._cache.release_copies(copies)
        return None

    def _start(self, request: Request, match: PrefixMatch, seconds: float) -> None:
        """The request runs; finding what the pool has of it took `seconds`."""
        self.waiting.remove(request)
        insort(self.running, request, key=_by_arrival)
        request.status = Status.RUNNING
        request.num_computed_tokens = match.num_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = match.num_tokens
            request.sources.pool.tokens, request.sources.pool.seconds = match.num_tokens, seconds
            request.sources.computed.tokens = request.num_prompt_tokens - match.num_tokens
            self.just_admitted.append(request)
        self._offload.admitted(request, match)

    def _being_computed(self, request: Request) -> list[BlockHash]:
        """Full blocks this running request has yet to compute; others who need them wait instead of computing too."""
        if not self._cache.enable_prefix_caching or request.num_remaining <= 1:
            return []
        return request.chain.hashes[request.num_computed_tokens // self._cache.block_size :]

    def _own_blocks(self, request: Request, in_flight: Collection[BlockHash]) -> int:
        """Blocks that a request which waits will want besides those that are under way, or were."""
        last = max((i for i, block in enumerate(request.chain.hashes) if block in in_flight), default=-1)
        return self._cache.blocks_for(len(request.tokens)) - self._cache.blocks_for((last + 1) * self._cache.block_size)

    def _next_block(self, request: Request, num_matched: int) -> BlockHash | None:
        index = num_matched // self._cache.block_size
        return request.chain.hashes[index] if index < len(request.chain.hashes) else None


def _row(request: Request, count: int) -> BatchRow:
    start = request.num_computed_tokens
    assert request.table_arrays is not None
    return BatchRow(
        request_id=request.request_id,
        token_ids=tuple(request.tokens[start : start + count]),
        start=start,
        block_tables=request.table_arrays.snapshot(),
        sample=start + count == len(request.tokens),
    )
