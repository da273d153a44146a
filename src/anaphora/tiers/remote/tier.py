"""The remote tier: frames blocks for a RemoteStore, believes nothing that comes back, and leaves a sick store alone.

Whatever the store does costs a bounded time and a miss: it is slow or down (its timeouts, then the circuit breaker),
full (DROPPED), or it lies (another key's value, an old version, a value cut short or changed: CORRUPT, and removed).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import TypeVar

from anaphora.tiers.format import header_bytes, pack_header
from anaphora.tiers.remote.breaker import Circuit, CircuitBreaker
from anaphora.tiers.remote.hot import HotKeys
from anaphora.tiers.stats import Counters
from anaphora.tiers.store import BlockMeta, Outcome, RemoteStore, StoreError, TierStats

BATCH_BYTES = 64 << 20
"""Payload of one call of the store: when one fails, the blocks before it are there and those after it are not asked."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class RemoteTier:
    """A BlockStore over any RemoteStore. Thread-safe as far as the store is."""

    name = "remote"

    def __init__(
        self, store: RemoteStore, *, breaker: CircuitBreaker | None = None, hot: HotKeys | None = None
    ) -> None:
        self._store = store
        self._breaker = breaker or CircuitBreaker()
        self._hot = hot or HotKeys()
        self._counters = Counters()
        self._last_error = ""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if not keys:
            return []
        return self._asked(lambda: _as_many(keys, self._store.contains(keys))) or [False] * len(keys)

    def load(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        start = perf_counter()
        outcomes = [Outcome.FAILED] * len(blocks)
        for batch in _batches(into):
            found = self._load(blocks[batch], into[batch])
            outcomes[batch.start : batch.start + len(found)] = found
            if len(found) < batch.stop - batch.start:
                break
        self._counters.loaded(outcomes, [view.nbytes for view in into], perf_counter() - start)
        return outcomes

    def save(self, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> list[Outcome]:
        start, written = perf_counter(), 0
        outcomes = [Outcome.FAILED] * len(blocks)
        for batch in _batches(data):
            stored = self._save(blocks[batch], data[batch])
            if stored is None:
                break
            outcomes[batch], size = stored
            written += size
        self._counters.saved(outcomes, written, perf_counter() - start)
        return outcomes

    def discard(self, keys: Sequence[bytes]) -> None:
        if keys:
            self._asked(lambda: self._store.delete(keys))

    def used(self, keys: Sequence[bytes]) -> None:
        """Nothing: a shared store keeps its own order."""

    def keep_locally(self, keys: Sequence[bytes]) -> list[bool]:
        """Count a read of each block, and say which are read so often that a copy should stay in a local tier."""
        return self._hot.count(keys)

    def register(self, memory: memoryview) -> None:
        """Payload views will lie in this memory; see RemoteStore."""
        self._tried(lambda: self._store.register(memory))

    @property
    def circuit(self) -> Circuit:
        return self._breaker.state

    def stats(self) -> TierStats:
        """`off` says what the store did last, while it is left alone."""
        off = "" if self._breaker.state is Circuit.CLOSED else self._last_error
        return self._counters.snapshot(used_bytes=0, blocks=0, off=off)

    def close(self) -> None:
        self._store.close()

    def _load(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        """Outcomes of the blocks until the store failed. Each is judged while the store brings the next."""
        heads = [bytearray(header_bytes(block.num_tokens)) for block in blocks]
        views = [[memoryview(head), view] for head, view in zip(heads, into, strict=True)]
        outcomes: list[Outcome] = []

        def read() -> list[Outcome]:
            lengths = self._store.read([block.key for block in blocks], views)
            for found in zip(blocks, heads, into, lengths, strict=True):
                outcomes.append(_judge(*found))  # noqa: PERF401  what was judged before a failure counts
            return outcomes

        if self._asked(read, wrong=_only_lies) is not None:
            corrupt = [block.key for block, outcome in zip(blocks, outcomes, strict=True) if outcome is Outcome.CORRUPT]
            if corrupt:
                self._tried(lambda: self._store.delete(corrupt))
        return outcomes

    def _save(self, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> tuple[list[Outcome], int] | None:
        wanted = [block.key for block in blocks]
        there = self._asked(lambda: _as_many(wanted, self._store.contains(wanted)))
        if there is None:
            return None
        outcomes = [Outcome.OK] * len(blocks)
        new = [index for index, known in enumerate(there) if not known]
        if not new:
            return outcomes, 0
        values = _Values([blocks[index] for index in new], [data[index] for index in new])
        stored = self._asked(lambda: _as_many(values.keys, self._store.write(values.keys, values.sizes, values)))
        if stored is None:
            return None
        for index, done in zip(new, stored, strict=True):
            outcomes[index] = Outcome.OK if done else Outcome.DROPPED
        return outcomes, sum(data[index].nbytes for index, done in zip(new, stored, strict=True) if done)

    def _asked(self, call: Callable[[], T], *, wrong: Callable[[T], str] = lambda _: "") -> T | None:
        """The call's answer; None when it failed or the circuit is open. `wrong` says what speaks against it."""
        if not self._breaker.allows():
            return None
        answers = self._tried(call)
        for answer in answers:
            if complaint := wrong(answer):
                self._failed(complaint)
            else:
                self._succeeded()
        return answers[0] if answers else None

    def _tried(self, call: Callable[[], T]) -> list[T]:
        """The call's answer, or nothing."""
        try:
            return [call()]
        except Exception as error:  # a StoreError, or whatever an outside package's store lets through
            self._failed(str(error) or type(error).__name__)
            return []

    def _succeeded(self) -> None:
        if self._breaker.state is not Circuit.CLOSED:
            log.info("the remote cache answers again")
        self._breaker.succeeded()

    def _failed(self, why: str) -> None:
        self._last_error = why
        before = self._breaker.state
        self._breaker.failed()
        if before is Circuit.CLOSED and self._breaker.state is not Circuit.CLOSED:
            log.warning("the remote cache is left alone until it answers again, requests go on without it: %s", why)


class _Values(Sequence[Sequence[memoryview]]):
    """What is stored of each block: header and payload. The header, and its checksum, is made when it is asked for."""

    def __init__(self, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> None:
        self._blocks = blocks
        self._data = data
        self.keys = [block.key for block in blocks]
        self.sizes = [header_bytes(block.num_tokens) + view.nbytes for block, view in zip(blocks, data, strict=True)]

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> Sequence[memoryview]:  # type: ignore[override]
        return memoryview(pack_header(self._blocks[index], self._data[index])), self._data[index]


def _judge(block: BlockMeta, head: bytearray, payload: memoryview, length: int | None) -> Outcome:
    """OK only for exactly the header that this block with this payload has, so no field can be forgotten."""
    if length is None:
        return Outcome.MISS
    if length != len(head) + payload.nbytes or pack_header(block, payload) != head:
        return Outcome.CORRUPT
    return Outcome.OK


def _as_many(keys: Sequence[bytes], answers: list[bool]) -> list[bool]:
    if len(answers) != len(keys):
        raise StoreError(f"the store gave {len(answers)} answers to {len(keys)} questions")
    return answers


def _only_lies(outcomes: Sequence[Outcome]) -> str:
    lies = Outcome.CORRUPT in outcomes and Outcome.OK not in outcomes
    return "every block it gave was corrupt" if lies else ""


def _batches(views: Sequence[memoryview]) -> Iterator[slice]:
    """Runs of at most BATCH_BYTES, at least one block each."""
    start, size = 0, 0
    for index, view in enumerate(views):
        if size and size + view.nbytes > BATCH_BYTES:
            yield slice(start, index)
            start, size = index, 0
        size += view.nbytes
    if start < len(views):
        yield slice(start, len(views))
