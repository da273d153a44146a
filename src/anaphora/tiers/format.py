"""A stored block: a header that says all about it, then its payload. The same on disk, in a remote and in an export.

    0    8     magic "ANAKVBLK"
    8    2     version
    10   2     zero
    12   4     number of tokens, n
    16   8     payload bytes
    24   16    key
    40   16    parent's key
    56   16    digest of the space (model, codec, layout, tokenizer)
    72   32    codec name, UTF-8, filled up with zeros
    104  16    xxh3-128 of the payload
    120  8     depth: blocks before this one in its chain
    128  4n    token ids
    ...  16    xxh3-128 of the header up to here

Integers are little endian. A reader who knows which block it wants builds the header that block must have over
the payload it got and compares the two, so there is no field it could forget to check.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from xxhash import xxh3_128_digest

from anaphora.errors import AnaphoraError
from anaphora.tiers.store import KEY_BYTES, TOKEN_BYTES, BlockMeta, Space
from anaphora.types import BlockHash

MAGIC = b"ANAKVBLK"
VERSION = 1
CODEC_BYTES = 32
DIGEST_BYTES = 16
_FIELDS = struct.Struct(f"<8sHHIQ{KEY_BYTES}s{KEY_BYTES}s{DIGEST_BYTES}s{CODEC_BYTES}s{DIGEST_BYTES}sQ")
MAX_TOKENS = (1 << 16) - 1
"""Of one block; a header that claims more is not one of ours."""


class CorruptBlock(AnaphoraError):
    """These bytes are not a whole block of this version; the message says what is wrong with them."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says, for readers who do not know yet which block it is."""

    key: BlockHash
    parent: BlockHash
    tokens: bytes
    depth: int
    space: bytes
    codec: str
    payload_bytes: int
    checksum: bytes

    def meta(self, space: Space) -> BlockMeta:
        return BlockMeta(self.key, self.parent, self.tokens, self.depth, space)


def header_bytes(num_tokens: int) -> int:
    """Length of the header of a block of so many tokens."""
    return _FIELDS.size + num_tokens * TOKEN_BYTES + DIGEST_BYTES


def pack_header(meta: BlockMeta, payload: memoryview) -> bytes:
    """The one header that this block with this payload has."""
    start = (
        _FIELDS.pack(
            MAGIC,
            VERSION,
            0,
            meta.num_tokens,
            payload.nbytes,
            meta.key,
            meta.parent,
            meta.space.digest,
            meta.space.codec.encode(),
            xxh3_128_digest(payload),
            meta.depth,
        )
        + meta.tokens
    )
    return start + xxh3_128_digest(start)


def parse_header(raw: memoryview) -> Header:
    """The header at the start of `raw`, which may go on after it. Raises CorruptBlock."""
    if raw.nbytes < _FIELDS.size:
        raise CorruptBlock(f"cut short: {raw.nbytes} bytes, a header has at least {_FIELDS.size}")
    magic, version, zero, count, length, key, parent, space, codec, checksum, depth = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise CorruptBlock("not a stored block: it does not start with the magic bytes")
    if version != VERSION:
        raise CorruptBlock(f"version {version} of the format; this program reads version {VERSION}")
    end = _FIELDS.size + count * TOKEN_BYTES
    if count > MAX_TOKENS or zero or raw.nbytes < end + DIGEST_BYTES:
        raise CorruptBlock(f"a header for {count} tokens does not fit into the {raw.nbytes} bytes there are")
    if xxh3_128_digest(raw[:end]) != raw[end : end + DIGEST_BYTES]:
        raise CorruptBlock("the header's checksum is wrong")
    name = codec.rstrip(b"\0").decode(errors="replace")
    tokens = bytes(raw[_FIELDS.size : end])
    return Header(BlockHash(key), BlockHash(parent), tokens, depth, space, name, length, checksum)


def check_payload(header: Header, payload: memoryview) -> None:
    """Raises CorruptBlock unless these are the bytes the header was made for."""
    if payload.nbytes != header.payload_bytes or xxh3_128_digest(payload) != header.checksum:
        raise CorruptBlock("the payload's checksum is wrong")
