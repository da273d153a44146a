"""A value larger than one chunk lies under keys of its own, behind a manifest.

    key      -> "ANCM" | version u16 | 0 u16 | length u64 | chunk bytes u64 | crc32 u32      28 bytes, little endian
    key:0    -> the first `chunk bytes` of the value
    key:1    -> ...
    key:n-1  -> the rest

The manifest is written last, so whoever finds it found a value that was whole once. It is only a promise: a chunk
may be evicted before its manifest, and two writers' chunks may mix; the block's own checksum has the last word.
A reader knows the length it wants, so it asks for the manifest and the chunks at once.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

MANIFEST = struct.Struct("<4sHHQQ")
MANIFEST_BYTES = MANIFEST.size + 4
MAGIC = b"ANCM"
VERSION = 1
MAX_CHUNKS = 4096
"""Of one value; a manifest that claims more is not one of ours."""


def manifest(length: int, chunk_bytes: int) -> bytes:
    head = MANIFEST.pack(MAGIC, VERSION, 0, length, chunk_bytes)
    return head + zlib.crc32(head).to_bytes(4, "little")


def read_manifest(data: bytes | bytearray) -> tuple[int, int] | None:
    """(length, chunk bytes) of the value; None where this is no manifest of ours, or a damaged one."""
    if len(data) != MANIFEST_BYTES or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        return None
    magic, version, _, length, chunk_bytes = MANIFEST.unpack(data[:-4])
    if magic != MAGIC or version != VERSION or not 0 < chunk_bytes < length <= MAX_CHUNKS * chunk_bytes:
        return None
    return length, chunk_bytes


def count_chunks(length: int, chunk_bytes: int) -> int:
    return -(-length // chunk_bytes)


def chunk_keys(key: bytes, length: int, chunk_bytes: int) -> list[bytes]:
    return [b"%b:%d" % (key, index) for index in range(count_chunks(length, chunk_bytes))]


def split(parts: Sequence[memoryview], chunk_bytes: int) -> list[list[memoryview]]:
    """The concatenation of `parts`, cut every `chunk_bytes` bytes, without a copy."""
    chunks: list[list[memoryview]] = []
    room = 0
    for part in parts:
        start = 0
        while start < len(part):
            if room == 0:
                chunks.append([])
                room = chunk_bytes
            piece = part[start : start + room]
            chunks[-1].append(piece)
            start += len(piece)
            room -= len(piece)
    return chunks
