"""Values in chunks: cut without a copy, behind a manifest that says what it promises."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anaphora.tiers.remote.chunks import (
    MANIFEST_BYTES,
    MAX_CHUNKS,
    chunk_keys,
    count_chunks,
    manifest,
    read_manifest,
    split,
)


@given(st.lists(st.binary(max_size=50), max_size=6), st.integers(1, 40))
def test_chunks_put_together_are_the_value(parts: list[bytes], chunk_bytes: int) -> None:
    value = b"".join(parts)
    chunks = [b"".join(chunk) for chunk in split([memoryview(part) for part in parts], chunk_bytes)]
    assert b"".join(chunks) == value
    assert all(len(chunk) == chunk_bytes for chunk in chunks[:-1])
    assert len(chunks) == count_chunks(len(value), chunk_bytes) == len(chunk_keys(b"k", len(value), chunk_bytes))


def test_a_manifest_says_what_it_was_made_of() -> None:
    assert read_manifest(manifest(1000, 300)) == (1000, 300)
    assert chunk_keys(b"k", 1000, 300) == [b"k:0", b"k:1", b"k:2", b"k:3"]


def test_no_flipped_bit_and_no_cut_passes() -> None:
    good = manifest(1 << 30, 4 << 20)
    assert len(good) == MANIFEST_BYTES
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        assert read_manifest(bad) is None
    assert all(read_manifest(good[:size]) is None for size in range(len(good)))


def test_absurd_manifests_are_none() -> None:
    assert read_manifest(manifest(10, 0)) is None
    assert read_manifest(manifest(10, 10)) is None
    assert read_manifest(manifest(1 << 60, 1)) is None
    assert read_manifest(manifest(MAX_CHUNKS * 5, 5)) is not None
