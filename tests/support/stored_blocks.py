"""Blocks for the tests of tiers: content that follows from a name, in a chain."""

from __future__ import annotations

import random
import struct
from hashlib import blake2b

from anaphora.tiers.store import BlockMeta, Space
from anaphora.types import BlockHash

SPACE = Space(b"s" * 16, "model", "bf16/1")
OTHER_SPACE = Space(b"o" * 16, "other", "bf16/1")
SIZE = 8192


def key(name: object) -> BlockHash:
    return BlockHash(blake2b(repr(name).encode(), digest_size=16).digest())


def chain(name: object, length: int, *, space: Space = SPACE, tokens: int = 16) -> list[BlockMeta]:
    """Metas of the first `length` blocks of one sequence."""
    keys = [key((name, i)) for i in range(-1, length)]
    return [
        BlockMeta(keys[i + 1], keys[i], struct.pack(f"<{tokens}I", *range(i, i + tokens)), i, space)
        for i in range(length)
    ]


def payload(meta: BlockMeta, size: int = SIZE) -> memoryview:
    """The bytes of a block: anything else loaded for this meta is wrong."""
    return memoryview(bytearray(random.Random(meta.key).randbytes(size)))


def payloads(metas: list[BlockMeta], size: int = SIZE) -> list[memoryview]:
    return [payload(meta, size) for meta in metas]


def room(count: int, size: int = SIZE) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in range(count)]
