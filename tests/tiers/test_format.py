"""The header: no byte of it may change, nor of the payload, without being noticed."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from anaphora.tiers.format import CorruptBlock, check_payload, header_bytes, pack_header, parse_header
from anaphora.tiers.store import BlockMeta, Space
from support.stored_blocks import OTHER_SPACE, chain, key, payload

META = chain("a", 3)[2]
DATA = payload(META, 1000)
HEADER = pack_header(META, DATA)


def test_a_header_says_what_was_put_in() -> None:
    header = parse_header(memoryview(HEADER + b"more"))
    assert header.meta(META.space) == META
    assert (header.codec, header.space, header.payload_bytes) == ("bf16/1", META.space.digest, 1000)
    assert len(HEADER) == header_bytes(META.num_tokens) == 128 + 16 * 4 + 16
    check_payload(header, DATA)


@pytest.mark.parametrize("at", range(len(HEADER)))
def test_every_flipped_byte_of_the_header_is_noticed(at: int) -> None:
    broken = bytearray(HEADER)
    broken[at] ^= 0x10
    assert bytes(broken) != pack_header(META, DATA)
    with pytest.raises(CorruptBlock):
        parse_header(memoryview(broken))


@pytest.mark.parametrize("at", [0, 1, 499, 998, 999])
def test_every_flipped_byte_of_the_payload_is_noticed(at: int) -> None:
    broken = memoryview(bytearray(DATA))
    broken[at] ^= 1
    assert pack_header(META, broken) != HEADER
    with pytest.raises(CorruptBlock):
        check_payload(parse_header(memoryview(HEADER)), broken)


@pytest.mark.parametrize("length", range(0, len(HEADER), 7))
def test_every_truncation_is_noticed(length: int) -> None:
    with pytest.raises(CorruptBlock):
        parse_header(memoryview(HEADER)[:length])
    with pytest.raises(CorruptBlock):
        check_payload(parse_header(memoryview(HEADER)), DATA[: 4 * length])


@pytest.mark.parametrize(
    "other",
    [
        replace(META, key=key("b")),
        replace(META, parent=key("b")),
        replace(META, tokens=struct.pack("<16I", *range(16))),
        replace(META, tokens=META.tokens[:-4]),
        replace(META, depth=1),
        replace(META, space=OTHER_SPACE),
        replace(META, space=Space(META.space.digest, "model", "bf16/2")),
    ],
)
def test_another_block_has_another_header(other: BlockMeta) -> None:
    assert pack_header(other, DATA) != HEADER


def test_the_models_name_decides_nothing() -> None:
    assert pack_header(replace(META, space=Space(META.space.digest, "renamed", "bf16/1")), DATA) == HEADER
