"""What a segment's table says about a slot: 64 bytes each, drawn in segment.py."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple, cast

from xxhash import xxh3_64_intdigest

from anaphora.tiers.store import BlockMeta
from anaphora.types import BlockHash

_RECORD = struct.Struct("<16s16sIIIHHQQ")
RECORD_BYTES = _RECORD.size
FREE = bytes(RECORD_BYTES)
"""Of a slot that holds nothing."""
LAST_USED_AT = 56
"""Offset of the last use, 8 bytes. It changes with every hit and is not under the checksum: it only orders."""
_CHECKED = 48
_SANE_CLOCK = 1 << 62
_LAST_SECOND = (1 << 32) - 1


class Record(NamedTuple):
    """A slot's block."""

    slot: int
    key: BlockHash
    parent: BlockHash
    stored_at: int
    """Seconds since 1970 by the clock of then; no order of entries depends on it."""
    payload_bytes: int
    depth: int
    num_tokens: int
    last_used: int


def pack_record(slot: int, meta: BlockMeta, payload_bytes: int, *, stored_at: int, last_used: int) -> bytes:
    """For a slot that holds this block."""
    then = min(max(0, stored_at), _LAST_SECOND)
    raw = _RECORD.pack(meta.key, meta.parent, then, payload_bytes, meta.depth, meta.num_tokens, 0, 0, last_used)
    check = xxh3_64_intdigest(raw[:_CHECKED], slot).to_bytes(8, "little")
    return raw[:_CHECKED] + check + raw[LAST_USED_AT:]


def parse_records(raw: bytes, first: int = 0) -> Iterator[Record | None]:
    """The records of the slots from `first` on; None: nothing, or one that was not written whole."""
    for slot, fields in enumerate(_RECORD.iter_unpack(raw), first):
        key, parent, stored_at, payload, depth, count, _, check, last_used = fields
        at = (slot - first) * RECORD_BYTES
        if not check or xxh3_64_intdigest(raw[at : at + _CHECKED], slot) != check:
            yield None
            continue
        used = last_used if last_used < _SANE_CLOCK else 0
        yield Record(slot, cast(BlockHash, key), cast(BlockHash, parent), stored_at, payload, depth, count, used)
