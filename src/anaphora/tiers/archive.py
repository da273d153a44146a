"""A warm cache in one file, to carry it to another machine.

    magic "ANAKVEXP" | version u32 | zero u32
    then records, each after one byte that says its kind:
      S   length u32 | JSON: space, model, codec | its xxh3-128  before the first block of its space
      B   length u32 | header (format.py) | payload              parents before their children
      E   number of blocks u64                                   the end

Every block carries its checksums, so a damaged file gives what is whole before the damage. Checksums say that bytes
are as they were written, not who wrote them: take files only from those whose computing you trust.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_128_digest

from anaphora.blocks.eviction import LRU
from anaphora.errors import ConfigError
from anaphora.tiers.directory import lock_bytes, segment_paths
from anaphora.tiers.disk import DiskTier
from anaphora.tiers.format import (
    CODEC_BYTES,
    DIGEST_BYTES,
    MAX_TOKENS,
    CorruptBlock,
    check_payload,
    header_bytes,
    parse_header,
)
from anaphora.tiers.maintenance import read_all, survey
from anaphora.tiers.memory import PAGE
from anaphora.tiers.record import RECORD_BYTES
from anaphora.tiers.segment import CorruptSegment, Segment, slot_bytes
from anaphora.tiers.store import BlockMeta, Outcome, Space, StoreError

MAGIC = b"ANAKVEXP"
VERSION = 1
_START = struct.Struct("<8sII")
_LENGTH = struct.Struct("<I")
_COUNT = struct.Struct("<Q")
_LARGEST_SPACE = 1 << 16
_LARGEST_PAYLOAD = 1 << 30
_ALLOWANCE = 256 * PAGE
"""Superblocks and the rest of tables, for as many segments as there can be."""


@dataclass(slots=True)
class Moved:
    """What an export or import did."""

    blocks: int = 0
    payload_bytes: int = 0
    skipped: int = 0
    """Damaged blocks that were left out; of an import: blocks that found no room."""
    damage: str = ""
    """Why an import ended before the end of its file."""


def export(directory: Path, file: Path, progress: Callable[[int], None] = lambda blocks: None) -> Moved:
    """Write every whole block of a folder into `file`, which is there when all of it is. A server may go on.

    Raises ConfigError for what is no disk cache, StoreError when it cannot be read or the file cannot be written.
    """
    survey(directory)  # is it a folder that can be read?
    unfinished = file.with_name(file.name + ".tmp")
    moved = Moved()
    segments: list[Segment] = []
    try:
        for path in segment_paths(directory):
            try:
                segments.append(Segment.open(path, write=False))
            except CorruptSegment:
                moved.skipped += 1
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as out:
            _write_all(out, segments, moved, progress)
        unfinished.rename(file)
    except OSError as error:
        raise StoreError(
            f"{file} cannot be written: {error.strerror}; name a file in a folder that exists and has room"
        ) from error
    finally:  # also when it is interrupted
        with suppress(OSError):
            unfinished.unlink()
        for segment in segments:
            segment.close()
    return moved


def load(
    directory: Path, file: Path, limit: int | None = None, progress: Callable[[int], None] = lambda blocks: None
) -> Moved:
    """Store the blocks of `file` in a folder, made if need be, of at most `limit` bytes; None: as many as it takes.

    Raises ConfigError (no such export, folder in use) and StoreError (the folder cannot be written).
    """
    if limit is None:
        there = survey(directory).used_bytes if directory.is_dir() else lock_bytes()
        needed = sum(
            slot_bytes(meta.num_tokens, payload.nbytes) + RECORD_BYTES for meta, payload in _blocks(file, Moved())
        )
        limit = there + needed + _ALLOWANCE
    moved = Moved()
    tier = DiskTier(directory, limit, LRU())
    try:
        for meta, payload in _blocks(file, moved):
            if tier.save([meta], [payload]) == [Outcome.OK]:
                moved.blocks += 1
                moved.payload_bytes += payload.nbytes
            else:
                moved.skipped += 1
            progress(moved.blocks)
    finally:
        tier.close()
    return moved


def _write_all(out: BinaryIO, segments: list[Segment], moved: Moved, progress: Callable[[int], None]) -> None:
    out.write(_START.pack(MAGIC, VERSION, 0))
    told: set[bytes] = set()
    depths = sorted({record.depth for segment in segments for record in segment.records() if record is not None})
    for depth in depths:  # parents before their children
        for segment in segments:
            for _, found in read_all(segment, lambda record, depth=depth: record.depth == depth):  # type: ignore[misc]
                if isinstance(found, CorruptBlock):
                    moved.skipped += 1
                    continue
                _, raw, payload = found
                if segment.space.digest not in told:
                    told.add(segment.space.digest)
                    _write_space(out, segment.space)
                out.write(b"B" + _LENGTH.pack(raw.nbytes))
                out.write(raw)
                out.write(payload)
                moved.blocks += 1
                moved.payload_bytes += payload.nbytes
                progress(moved.blocks)
    out.write(b"E" + _COUNT.pack(moved.blocks))


def _write_space(out: BinaryIO, space: Space) -> None:
    text = json.dumps({"space": space.digest.hex(), "model": space.model, "codec": space.codec}).encode()
    out.write(b"S" + _LENGTH.pack(len(text)) + text + xxh3_128_digest(text))


def _blocks(file: Path, moved: Moved) -> Iterator[tuple[BlockMeta, memoryview]]:
    """The blocks of an export up to its end or its first damage, which goes into `moved`."""
    try:
        with file.open("rb") as raw:
            start = raw.read(_START.size)
            if len(start) < _START.size or start[: len(MAGIC)] != MAGIC:
                raise ConfigError(f"{file} is no export; name a file that `anaphora cache export` wrote")
            if (version := _START.unpack(start)[1]) != VERSION:
                raise ConfigError(
                    f"{file} has version {version}; this program reads version {VERSION}: export it anew with it"
                )
            try:
                yield from _records(raw)
            except CorruptBlock as error:
                moved.damage = str(error)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; name a file of `anaphora cache export`") from error


def _records(raw: BinaryIO) -> Iterator[tuple[BlockMeta, memoryview]]:
    spaces: dict[bytes, Space] = {}
    count = 0
    while (kind := _exactly(raw, 1)) != b"E":
        (length,) = _LENGTH.unpack(_exactly(raw, _LENGTH.size))
        if kind == b"S" and length <= _LARGEST_SPACE:
            space = _parse_space(_exactly(raw, length), _exactly(raw, DIGEST_BYTES))
            spaces[space.digest] = space
        elif kind == b"B" and length <= header_bytes(MAX_TOKENS):
            header = parse_header(memoryview(_exactly(raw, length)))
            if header.space not in spaces or header.payload_bytes > _LARGEST_PAYLOAD:
                raise CorruptBlock("a block of a space that was not announced")
            payload = memoryview(_exactly(raw, header.payload_bytes))
            check_payload(header, payload)
            count += 1
            yield header.meta(spaces[header.space]), payload
        else:
            raise CorruptBlock("what follows is no record")
    if _COUNT.unpack(_exactly(raw, _COUNT.size)) != (count,):
        raise CorruptBlock("blocks are missing")


def _exactly(raw: BinaryIO, size: int) -> bytes:
    data = raw.read(size)
    if len(data) != size:
        raise CorruptBlock("the file is cut short")
    return data


def _parse_space(text: bytes, checksum: bytes) -> Space:
    if xxh3_128_digest(text) != checksum:
        raise CorruptBlock("a space's checksum is wrong")
    try:
        fields = json.loads(text)
        space = Space(bytes.fromhex(fields["space"]), str(fields["model"]), str(fields["codec"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptBlock("a space that makes no sense") from error
    if len(space.digest) != DIGEST_BYTES or len(space.codec.encode()) > CODEC_BYTES:
        raise CorruptBlock("a space that makes no sense")
    return space
