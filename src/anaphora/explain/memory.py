"""What is remembered of earlier prompts once their blocks are gone: names and times, never tokens. All bounded."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

from anaphora.types import BlockHash

K = TypeVar("K")
V = TypeVar("V")


class Bounded(Generic[K, V]):
    """A mapping of at most `limit` entries; what was put longest ago is dropped first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        """As the newest."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self.limit:
            self._entries.popitem(last=False)

    def discard(self, key: K) -> None:
        self._entries.pop(key, None)

    def clear(self) -> None:
        self._entries.clear()


class Eviction(NamedTuple):
    """One block that made room."""

    time: float
    """Of the explainer's clock."""
    by: str
    """The request that the room was made for."""
    serial: int
    """Evictions before it."""


class Evictions:
    """The latest evictions, by block and by parent."""

    def __init__(self, limit: int) -> None:
        self._count = 0
        self._first: Bounded[str, int] = Bounded(limit)
        """Evictions before the first one that was for a request."""
        self._blocks: Bounded[BlockHash, Eviction] = Bounded(limit)
        self._children: Bounded[BlockHash, BlockHash] = Bounded(limit)

    def __len__(self) -> int:
        return len(self._blocks)

    def note(self, block: BlockHash, parent: BlockHash, time: float, by: str) -> None:
        if self._first.get(by) is None:
            self._first.put(by, self._count)
        self._blocks.put(block, Eviction(time, by, self._count))
        self._children.put(parent, block)
        self._count += 1

    def get(self, block: BlockHash) -> Eviction | None:
        return self._blocks.get(block)

    def discard(self, block: BlockHash) -> None:
        """It is being computed again."""
        self._blocks.discard(block)

    def child_of(self, parent: BlockHash) -> BlockHash | None:
        """The block that went last of those below `parent`."""
        return self._children.get(parent)

    def room_for(self, evictions: Sequence[Eviction], request: str) -> int:
        """So many more blocks in the pool, and these would have been there when the request came.

        With one block more, one eviction less had come to pass by then; the request's own do not count. Exact for
        policies whose order does not depend on the size, as long as nothing came back in between; else an upper bound.
        """
        first = self._first.get(request)
        return (self._count if first is None else first) - min(eviction.serial for eviction in evictions)

    def clear(self) -> None:
        self._blocks.clear()
        self._children.clear()


class Elsewhere(NamedTuple):
    """A prefix, and the namespace and request it was computed in last."""

    namespace_key: bytes
    request_id: str


class Prefixes:
    """Prefixes of 1, 2, 4, 8 ... blocks, whatever their namespace: the same tokens under another salt are known again.

    Digests are keyed anew in every process, so nothing can be looked up in them from outside.
    """

    def __init__(self, limit: int) -> None:
        self._key = secrets.token_bytes(16)
        self._known: Bounded[bytes, Elsewhere] = Bounded(limit)

    def __len__(self) -> int:
        return len(self._known)

    def digests(self, packed: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """(blocks, digest) of the prefixes of a prompt's packed blocks: powers of two, and the whole."""
        digest, done, rungs = blake2b(digest_size=16, key=self._key), 0, []
        while done < len(packed):
            stop = min(len(packed), 2 * done or 1)
            digest.update(b"".join(packed[done:stop]))
            rungs.append((stop, digest.digest()))
            done = stop
        return rungs

    def longest_elsewhere(
        self, rungs: Sequence[tuple[int, bytes]], namespace_key: bytes
    ) -> tuple[int, Elsewhere] | None:
        """The longest of these prefixes that was last computed in another namespace, in blocks."""
        for blocks, digest in reversed(rungs):
            known = self._known.get(digest)
            if known is not None and known.namespace_key != namespace_key:
                return blocks, known
        return None

    def note(self, rungs: Sequence[tuple[int, bytes]], namespace_key: bytes, request_id: str) -> None:
        where = Elsewhere(namespace_key, request_id)
        for _, digest in rungs:
            self._known.put(digest, where)

    def clear(self) -> None:
        self._known.clear()
