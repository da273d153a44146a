"""One file of the disk tier: equal slots for the blocks of one space, and the table that says what is in them.

    0            superblock   magic, version, xxh3-128, JSON: slot size and count, space
    4096         table        one 64-byte record per slot; all zeros: the slot is free
    data_start   slots        each: header (format.py), filled up to whole pages; payload, filled up to whole pages

    record    0 key 16 | 16 parent 16 | 32 stored at, seconds since 1970, 4 | 36 payload bytes 4 | 40 depth 4
             44 number of tokens 2 | 46 zero 2 | 48 xxh3-64 of all that, seeded with the slot's number, 8
             56 last used, by the tier's logical clock, 8

A block is committed by its record, which is written after its slot and wiped before the slot is written again: a
process that dies in between leaves a free slot. Nothing is synced, because a killed process loses nothing that it
wrote; after a power failure what did not reach the disk fails its checksum and is a miss.
Slots go around the page cache where the file system can (they would only be there twice); records go through it.
Neighbouring slots are written and read in one call, and their records are.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from os import posix_fallocate, pread, preadv, pwrite, pwritev
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128_digest

from anaphora.errors import AnaphoraError
from anaphora.tiers.format import CorruptBlock, header_bytes, pack_header
from anaphora.tiers.memory import PAGE, copy, is_paged, page_buffer, round_up
from anaphora.tiers.record import FREE, LAST_USED_AT, RECORD_BYTES, Record, parse_records
from anaphora.tiers.store import BlockMeta, Space

MAGIC = b"ANAKVSEG"
VERSION = 1
_SUPERBLOCK = struct.Struct("<8sII16s")  # magic, version, length of the JSON, checksum of the JSON
_MODEL_CHARS = 200
"""Of a model's name are kept: the superblock is one page."""


class CorruptSegment(AnaphoraError):
    """The file is no segment of this version; the message says why."""


def slot_bytes(num_tokens: int, payload_bytes: int) -> int:
    """Bytes of a slot for such a block."""
    return round_up(header_bytes(num_tokens)) + round_up(payload_bytes)


def data_start(num_slots: int) -> int:
    return PAGE + round_up(num_slots * RECORD_BYTES)


def file_bytes(slot_size: int, num_slots: int) -> int:
    """Bytes of a segment's file, which never change."""
    return data_start(num_slots) + num_slots * slot_size


def slots_that_fit(slot_size: int, size: int) -> int:
    """The most slots of a segment whose file has at most `size` bytes."""
    count = max(0, (size - PAGE) // (slot_size + RECORD_BYTES))
    while count and file_bytes(slot_size, count) > size:
        count -= 1
    return count


class _Scratch(threading.local):
    """Page-aligned memory of each thread that reads or writes."""

    def __init__(self) -> None:
        self._memory = page_buffer(PAGE)

    def take(self, size: int) -> memoryview:
        if self._memory.nbytes < size:
            self._memory = page_buffer(size)
        return self._memory[:size]


_scratch = _Scratch()


class _Frame(NamedTuple):
    """One slot's part of a transfer."""

    header: memoryview
    payload: memoryview
    parts: tuple[memoryview, ...]
    """Both and what fills them up, in the slot's order."""


class Segment:
    """An open segment. Methods raise OSError when the device says no; slots are the caller's to hand out."""

    def __init__(self, path: Path, space: Space, slot_size: int, num_slots: int, *, write: bool = True) -> None:
        self.path = path
        self.space = space
        self.slot_size = slot_size
        self.num_slots = num_slots
        self.file_bytes = file_bytes(slot_size, num_slots)
        self.free: deque[int] = deque()
        """Slots without a block; the first goes next, so that blocks freed in order are written in order."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
        self._table = os.open(path, flags)
        self._data = _open_direct(path, flags)
        self._data_start = data_start(num_slots)

    @classmethod
    def create(cls, path: Path, space: Space, slot_size: int, num_slots: int) -> Segment:
        """A new file, whole or not there at all; its space is taken from the file system now. Raises OSError."""
        text = json.dumps(
            {
                "slot_bytes": slot_size,
                "num_slots": num_slots,
                "space": space.digest.hex(),
                "model": space.model[:_MODEL_CHARS],
                "codec": space.codec,
            }
        ).encode()
        unfinished = path.with_suffix(".tmp")
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            posix_fallocate(fd, 0, file_bytes(slot_size, num_slots))
            start = _SUPERBLOCK.pack(MAGIC, VERSION, len(text), xxh3_128_digest(text)) + text
            _check_whole(pwrite(fd, start, 0), len(start))
            unfinished.rename(path)
            segment = cls(path, space, slot_size, num_slots)
        except OSError:
            unfinished.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        segment.free.extend(range(num_slots))
        return segment

    @classmethod
    def open(cls, path: Path, *, write: bool = True) -> Segment:
        """An existing file; slots that were cut off are there, empty, when it may be written.

        Raises CorruptSegment and OSError.
        """
        with path.open("rb", buffering=0) as file:
            raw = file.read(PAGE)
            size = os.fstat(file.fileno()).st_size
        space, slot_size, num_slots = _parse_superblock(raw)
        segment = cls(path, space, slot_size, num_slots, write=write)
        if write and size != segment.file_bytes:
            try:
                os.truncate(path, segment.file_bytes)
            except OSError:
                segment.close()
                raise
        return segment

    def suits(self, space: Space, slot_size: int) -> bool:
        """Whether its slots are for such blocks."""
        return self.slot_size == slot_size and self.space.digest == space.digest

    def records(self) -> Iterator[Record | None]:
        """What each slot holds, in order; None: nothing, or a record that was not written whole."""
        raw = pread(self._table, self.num_slots * RECORD_BYTES, PAGE)
        return parse_records(raw.ljust(self.num_slots * RECORD_BYTES, b"\0"))

    def record(self, slot: int) -> Record | None:
        """The record of one slot as it is now."""
        raw = pread(self._table, RECORD_BYTES, PAGE + slot * RECORD_BYTES)
        return next(parse_records(raw.ljust(RECORD_BYTES, b"\0"), slot))

    def wipe(self, slot: int) -> None:
        """The slot holds nothing from now on; before it is written again, and when its block is forgotten."""
        self._write_table(slot, 0, FREE)

    def commit(self, slot: int, records: Sequence[bytes]) -> None:
        """The slots from `slot` on, written before, hold these blocks from now on, whatever happens to the process."""
        self._write_table(slot, 0, b"".join(records))

    def touch(self, slot: int, last_used: int) -> None:
        """Remember over a restart when the block was used."""
        self._write_table(slot, LAST_USED_AT, last_used.to_bytes(8, "little"))

    def write(self, slot: int, blocks: Sequence[BlockMeta], payloads: Sequence[memoryview]) -> int:
        """Fill the slots from `slot` on; not yet blocks of the file until `commit`. Bytes written."""
        frames = self._frames(blocks, payloads)
        for block, payload, frame in zip(blocks, payloads, frames, strict=True):
            header = pack_header(block, payload)
            frame.header[: len(header)] = header
            if frame.payload is not payload:
                copy(frame.payload, payload)
        size = len(blocks) * self.slot_size
        parts = [part for frame in frames for part in frame.parts]
        _check_whole(pwritev(self._data, parts, self._offset(slot)), size)
        return size

    def read(self, slot: int, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[bool]:
        """Read the slots from `slot` on; whether each holds that very block, whole.

        Raises CorruptBlock when the file ends before them, or a block does not fill a slot.
        """
        frames = self._frames(blocks, into)
        parts = [part for frame in frames for part in frame.parts]
        if preadv(self._data, parts, self._offset(slot)) != len(blocks) * self.slot_size:
            raise CorruptBlock("the file ends inside the block")
        verdicts = []
        for block, view, frame in zip(blocks, into, frames, strict=True):
            if frame.payload is not view:
                copy(view, frame.payload)
            expected = pack_header(block, view)
            verdicts.append(frame.header[: len(expected)] == expected)
        return verdicts

    def read_raw(self, record: Record) -> tuple[memoryview, memoryview]:
        """(header, payload) of a slot, unverified; good until this thread reads again. Raises CorruptBlock."""
        head = header_bytes(record.num_tokens)
        front = round_up(head)
        size = front + round_up(record.payload_bytes)
        if size > self.slot_size:
            raise CorruptBlock("its record claims more bytes than a slot has")
        memory = _scratch.take(size)
        if preadv(self._data, [memory], self._offset(record.slot)) != size:
            raise CorruptBlock("the file ends inside the block")
        return memory[:head], memory[front : front + record.payload_bytes]

    def close(self) -> None:
        os.close(self._table)
        os.close(self._data)

    def delete(self) -> None:
        """Remove the file and close it. Raises OSError."""
        self.path.unlink()
        self.close()

    def _offset(self, slot: int) -> int:
        return self._data_start + slot * self.slot_size

    def _frames(self, blocks: Sequence[BlockMeta], payloads: Sequence[memoryview]) -> list[_Frame]:
        """Memory for one transfer of neighbouring slots; of payloads that lie badly, the thread's own."""
        fronts = [round_up(header_bytes(block.num_tokens)) for block in blocks]
        direct = [is_paged(payload) for payload in payloads]
        memory = _scratch.take(sum(f if paged else self.slot_size for f, paged in zip(fronts, direct, strict=True)))
        frames, at = [], 0
        for front, payload, paged in zip(fronts, payloads, direct, strict=True):
            if front + round_up(payload.nbytes) != self.slot_size:
                raise CorruptBlock("the block is not of the length that was stored")
            header = memory[at : at + front]
            if paged:
                frames.append(_Frame(header, payload, (header, payload)))
                at += front
            else:
                whole = memory[at : at + self.slot_size]
                frames.append(_Frame(header, whole[front : front + payload.nbytes], (whole,)))
                at += self.slot_size
        return frames

    def _write_table(self, slot: int, at: int, raw: bytes) -> None:
        _check_whole(pwrite(self._table, raw, PAGE + slot * RECORD_BYTES + at), len(raw))


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)  # a file system without direct I/O


def _check_whole(written: int, asked: int) -> None:
    if written != asked:
        raise OSError(errno.ENOSPC, f"only {written} of {asked} bytes were written")


def _parse_superblock(raw: bytes) -> tuple[Space, int, int]:
    if len(raw) < PAGE:
        raise CorruptSegment("the file is cut short")
    magic, version, length, checksum = _SUPERBLOCK.unpack_from(raw)
    if magic != MAGIC:
        raise CorruptSegment("the file does not start with the magic bytes")
    if version != VERSION:
        raise CorruptSegment(f"version {version} of the format; this program reads version {VERSION}")
    text = raw[_SUPERBLOCK.size : _SUPERBLOCK.size + length]
    if len(text) != length or xxh3_128_digest(text) != checksum:
        raise CorruptSegment("the superblock's checksum is wrong")
    try:
        fields = json.loads(text)
        space = Space(bytes.fromhex(fields["space"]), str(fields["model"]), str(fields["codec"]))
        slot_size, num_slots = int(fields["slot_bytes"]), int(fields["num_slots"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptSegment(f"the superblock makes no sense: {error}") from error
    if slot_size < 2 * PAGE or slot_size % PAGE or num_slots < 1:
        raise CorruptSegment(f"the superblock makes no sense: {num_slots} slots of {slot_size} bytes")
    return space, slot_size, num_slots
