"""Identity of a block's content: a keyed digest over (namespace, parent, token ids).

    key    = blake2b-256(every namespace field, each behind its length)
    root   = blake2b-128(key; block_size)
    hash_0 = blake2b-128(key; root   | token ids of block 0)
    hash_i = blake2b-128(key; hash_{i-1} | token ids of block i)

Token ids are packed as unsigned 32-bit little endian, so a hash is the same on every machine. The packed
form is kept: the prefix index compares it on every hit, and a collision can never serve wrong KV.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b

from anaphora.errors import InvalidRequest
from anaphora.types import BlockHash

TOKEN_BYTES = 4
"""Bytes of one packed token id."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides the tokens that decides what a block holds. Two namespaces never share a block."""

    weights_digest: str
    kv_dtype: str
    layout: str
    tokenizer_digest: str
    adapter: str = ""
    cache_salt: str = ""
    """Chosen by the tenant; a request finds only blocks computed under the same salt."""

    @property
    def key(self) -> bytes:
        """32 bytes, different for every different set of fields."""
        digest = blake2b(digest_size=32)
        for field in fields(self):
            # A salt comes from JSON, which may hold a lone surrogate.
            raw = getattr(self, field.name).encode("utf-8", "surrogatepass")
            digest.update(len(raw).to_bytes(8, "little"))
            digest.update(raw)
        return digest.digest()


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """TOKEN_BYTES bytes per id. Raises InvalidRequest for an id that is not in 0 .. 2**32 - 1."""
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error:
        wrong = next(t for t in tokens if not (isinstance(t, int) and 0 <= t < 1 << 8 * TOKEN_BYTES))
        raise InvalidRequest(
            f"{wrong!r} is not a token id; send whole numbers from 0 to the vocabulary's size", param="prompt"
        ) from None


def keyed(namespace_key: bytes) -> blake2b:
    """The digest that every hash of the namespace starts from (copying it costs half of keying it anew)."""
    return blake2b(digest_size=16, key=namespace_key)


def block_hash(start: blake2b, parent: bytes, packed: bytes) -> BlockHash:
    """16-byte digest of one block's packed tokens after `parent`; `start` is the namespace's `keyed`, unchanged."""
    digest = start.copy()
    digest.update(parent + packed)
    return BlockHash(digest.digest())


class HashChain:
    """The block hashes of one growing token sequence. Append-only: a hash is computed once per request.

    hashes[i] and packed[i] belong to tokens[i * block_size : (i + 1) * block_size].
    """

    def __init__(self, namespace_key: bytes, block_size: int) -> None:
        self.namespace_key = namespace_key
        self.block_size = block_size
        self.start = keyed(namespace_key)
        self.root = block_hash(self.start, b"", struct.pack("<I", block_size))
        """Stands where the parent of the first block would."""
        self.hashes: list[BlockHash] = []
        self.packed: list[bytes] = []
        """The token ids that were hashed, packed, one entry per hash."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash every full block of `tokens` not hashed yet; `tokens` is the whole sequence from its start.

        Raises InvalidRequest for an id that is no token id; then nothing was added.
        """
        done = len(self.hashes)
        full = len(tokens) // self.block_size
        if full <= done:
            return
        packed = pack_tokens(tokens[done * self.block_size : full * self.block_size])
        width = self.block_size * TOKEN_BYTES
        parent = self.hashes[-1] if self.hashes else self.root
        for start in range(0, len(packed), width):
            piece = packed[start : start + width]
            parent = block_hash(self.start, parent, piece)
            self.packed.append(piece)
            self.hashes.append(parent)
