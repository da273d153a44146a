"""What every tier is to the hierarchy (`BlockStore`), and what a shared store is to its tier (`RemoteStore`).

    engine thread            worker threads
    hierarchy  --queues-->   BlockStore:   RamTier | DiskTier | RemoteTier      verified blocks
                                                              |
                                           RemoteStore:  Valkey | Mooncake      plain values, believed by nobody

A batch is columns of equal length, not one object per question: lookups of thousands of keys stay cheap. Every
method but `contains` of a local tier may block; the hierarchy calls those on its worker threads, several at once,
so every store is thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from anaphora.errors import AnaphoraError
from anaphora.types import BlockHash

KEY_BYTES = 16
TOKEN_BYTES = 4


class StoreError(AnaphoraError):
    """A store could not answer: down, too slow, out of space, broken. Costs the caller a miss, never an answer."""

    exit_code = 3


class Outcome(Enum):
    """What became of one block of a batch."""

    OK = "ok"
    MISS = "miss"
    """Not there, or no longer."""
    CORRUPT = "corrupt"
    """There, but not the bytes that were stored, or not those of these tokens; the entry was removed."""
    FAILED = "failed"
    """The store could not be asked or written."""
    DROPPED = "dropped"
    """Not stored: too large, no room that may be made, or the store is switched off."""


@dataclass(frozen=True, slots=True)
class Space:
    """What blocks of one model in one form have in common; written with them, for `anaphora cache`.

    Adapter and salt are not in it: the keys cover them, and a salt is a tenant's secret.
    """

    digest: bytes
    """16 bytes over weights, codec and version, layout and tokenizer: few spaces share a directory."""
    model: str
    """The name people know it by; decides nothing."""
    codec: str
    """Name and version of the payload's form, such as "bf16/1"; at most 32 bytes of UTF-8."""


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """Which tokens a block holds; two blocks are the same if and only if these are."""

    key: BlockHash
    """KEY_BYTES bytes, see `group_key`."""
    parent: BlockHash
    """Key of the block before it in the same group; of the chain's root for the first."""
    tokens: bytes
    """The block's token ids, packed as unsigned 32-bit little endian."""
    depth: int
    """Blocks before it in its chain; 0 for the first."""
    space: Space

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


def group_key(digest: BlockHash, group: int) -> BlockHash:
    """The key of a prefix's block in cache group `group`; in group 0 the prefix's own hash."""
    if group == 0:
        return digest
    return BlockHash(digest[:-2] + (int.from_bytes(digest[-2:], "little") ^ group).to_bytes(2, "little"))


@dataclass(slots=True)
class TierStats:
    """What a tier counted since it was opened, in blocks unless it says otherwise.

    `hits`, `misses`, `corrupt` and `failed` are of loads; saves have their own.
    """

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


class BlockStore(Protocol):
    """One tier. Nothing of it raises for what a disk, a network or another process did: see Outcome.

    Payload views are contiguous bytes (format "B") of the caller's memory, which stays as it is until the call
    returns: a load writes straight into it, a save reads straight from it.
    """

    name: str
    """"ram", "disk" or "remote": what metrics and explanations call it."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is probably here. Changes nothing. Immediate in local tiers, one round trip in others."""

    def load(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        """Read each payload into its writable view, whose length is the payload's. Counts as a use.

        OK means: key, parent, tokens, codec and length are those asked for, and every byte is as it was stored.
        Otherwise the view's bytes mean nothing.
        """

    def save(self, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> list[Outcome]:
        """Store each payload. OK: it is here now (a block that was here already is not written again)."""

    def discard(self, keys: Sequence[bytes]) -> None:
        """Forget these; unknown keys are no error."""

    def used(self, keys: Sequence[bytes]) -> None:
        """These were hit nearer by: they are not to grow old here. Unknown keys are no error."""

    def stats(self) -> TierStats:
        """A snapshot. Immediate."""

    def close(self) -> None:
        """Let go of files, sockets and threads; harmless when done twice. Nothing may be called after it."""


class RemoteStore(Protocol):
    """A shared key-value store, dumb on purpose: RemoteTier frames, verifies, counts and breaks the circuit.

    Every method takes a bounded time (the store's own timeouts) and raises StoreError when the store as a whole
    cannot answer; what fails for one key only is that key's answer. Outside packages register a factory
    `(url: str) -> RemoteStore` as an entry point of the group "anaphora.remote_stores", named like the URL's scheme.
    """

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has a value, in one round trip as far as the store can."""

    def read(self, keys: Sequence[bytes], into: Sequence[Sequence[memoryview]]) -> Iterable[int | None]:
        """Scatter each value over its writable views, in order; the answers, one to a key and in their order, are
        the values' lengths, None: no value.

        Each answer may come as soon as its value is there: it is checked while the store fetches the next. A value
        whose length is not that of its views together may leave them as they are: the length tells.
        """

    def write(self, keys: Sequence[bytes], sizes: Sequence[int], parts: Sequence[Sequence[memoryview]]) -> list[bool]:
        """Store each value, the concatenation of its parts, `sizes` bytes long; False where the store had no room for
        it or refused.

        `parts[i]` is made when it is asked for, at the cost of a checksum: ask once, best while the store is busy
        with the values before. A key that has a value already may keep it: equal keys mean equal values.
        """

    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove these; unknown keys are no error. A store that evicts by itself may do it later."""

    def register(self, memory: memoryview) -> None:
        """Payload views will lie in this memory (the pool's, a buffer's): a store that can will skip copies."""

    def close(self) -> None:
        """Close connections; harmless when done twice."""
