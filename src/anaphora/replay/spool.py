"""A trace read once, checked once, put in order of time, and kept in a compact temporary file for many replays.

    record   arrival 8 | prompt tokens 4 | output tokens 4 | blocks n 4 | names 16 n

Requests are gathered in runs of a few MiB, each sorted and appended. When every run begins after the one before has
ended, the file is in order; otherwise the runs are merged into a second one (external merge sort, Knuth, TAOCP 3, 5.4).
So memory holds one run, or one buffer of each, however long the trace is.

A block's name is chained here: it stands for the block and all before it, whatever the trace's own ids stand for.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from heapq import merge
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import IO, NamedTuple

from anaphora.errors import InputError
from anaphora.replay.readers.base import TraceRequest
from anaphora.types import BlockHash

NAME_BYTES = 16
_HEAD = struct.Struct("<dIII")
_RUN_BYTES = 8 << 20
_BUFFER = 64 << 10


class Prompt(NamedTuple):
    """One request, ready to be replayed."""

    arrival: float
    """Seconds since the first request."""
    tokens: int
    output_tokens: int
    blocks: list[BlockHash]


@dataclass(frozen=True, slots=True)
class Spool:
    """A trace in order of time; small, and sent to other processes as it is."""

    path: Path
    block_size: int
    """Tokens of a block; 0 where no request has blocks."""
    requests: int
    blocks: int
    tokens: int
    output_tokens: int
    longest: int
    """Tokens of the longest prompt."""
    begin: float
    """The first arrival, by the trace's own clock."""
    seconds: float
    """From the first arrival to the last."""

    def __iter__(self) -> Iterator[Prompt]:
        with self.path.open("rb", buffering=1 << 20) as file:
            for prompt in _records(file):
                yield prompt._replace(arrival=prompt.arrival - self.begin)


class _Run(NamedTuple):
    start: int
    stop: int
    first: float
    last: float


@contextmanager
def spooled(requests: Iterable[TraceRequest], block_size: int) -> Iterator[Spool]:
    """The spool of some requests, removed at the end. `block_size`: of traces that hold token ids.

    Raises InputError when there is no request, when blocks of two sizes are mixed, and when the disk is full.
    """
    with tempfile.TemporaryDirectory(prefix="anaphora-replay-") as folder:
        path = Path(folder) / "spool"
        try:
            with path.open("wb") as file:
                spool, runs = _write(requests, block_size, path, file)
            if any(before.last > after.first for before, after in pairwise(runs)):
                spool = replace(spool, path=_merged(path, runs))
                path.unlink()
        except OSError as error:
            raise InputError(
                f"the trace does not fit into {folder}: {error.strerror}; set TMPDIR to a folder with more room"
            ) from None
        yield spool


def _write(requests: Iterable[TraceRequest], block_size: int, path: Path, file: IO[bytes]) -> tuple[Spool, list[_Run]]:
    held: list[tuple[float, bytes]] = []
    runs: list[_Run] = []
    size = count = blocks = tokens = output = longest = held_bytes = 0
    begin, end = float("inf"), float("-inf")
    for request in requests:
        if request.has_blocks:
            own = request.block_size or block_size
            if size not in (0, own):
                raise InputError(f"the trace mixes blocks of {size} and of {own} tokens; replay each part by itself")
            size = own
        names = chained(request, block_size)
        arrival = request.arrival
        head = _HEAD.pack(arrival, request.input_length, request.output_length, len(names))
        held.append((arrival, b"".join((head, *names))))
        held_bytes += _HEAD.size + NAME_BYTES * len(names) + 100
        count, blocks = count + 1, blocks + len(names)
        tokens, output = tokens + request.input_length, output + request.output_length
        longest = max(longest, request.input_length)
        begin, end = min(begin, arrival), max(end, arrival)
        if held_bytes > _RUN_BYTES:
            runs.append(_append(file, held))
            held, held_bytes = [], 0
    if held:
        runs.append(_append(file, held))
    if not count:
        raise InputError("the trace holds no usable request; give one with at least one")
    return Spool(path, size, count, blocks, tokens, output, longest, begin, end - begin), runs


def _append(file: IO[bytes], held: list[tuple[float, bytes]]) -> _Run:
    held.sort(key=lambda item: item[0])  # stable: what came at the same time stays as it was
    start = file.tell()
    file.writelines(record for _, record in held)
    return _Run(start, file.tell(), held[0][0], held[-1][0])


def _merged(path: Path, runs: list[_Run]) -> Path:
    target = path.with_name("sorted")
    with path.open("rb", buffering=0) as source, target.open("wb") as file:
        parts = [_records(_Window(source, run.start, run.stop)) for run in runs]
        for prompt in merge(*parts, key=attrgetter("arrival")):
            head = _HEAD.pack(prompt.arrival, prompt.tokens, prompt.output_tokens, len(prompt.blocks))
            file.write(b"".join((head, *prompt.blocks)))
    return target


class _Window:
    """Bytes start .. stop of a file that others read too, through a small buffer of its own."""

    def __init__(self, file: IO[bytes], start: int, stop: int) -> None:
        self._file, self._at, self._stop = file, start, stop
        self._buffer = b""

    def read(self, count: int) -> bytes:
        if len(self._buffer) < count:
            wanted = min(max(count - len(self._buffer), _BUFFER), self._stop - self._at)
            self._file.seek(self._at)
            more = self._file.read(wanted)
            self._at += len(more)
            self._buffer += more
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken


def _records(file: IO[bytes] | _Window) -> Iterator[Prompt]:
    while head := file.read(_HEAD.size):
        arrival, tokens, output, count = _HEAD.unpack(head)
        raw = file.read(count * NAME_BYTES)
        yield Prompt(arrival, tokens, output, [BlockHash(raw[i : i + 16]) for i in range(0, len(raw), NAME_BYTES)])


def chained(request: TraceRequest, block_size: int) -> list[BlockHash]:
    """The names of a request's blocks, NAME_BYTES each, every one standing for all before it too."""
    if request.hash_ids is None:
        return request.blocks(block_size) if request.token_ids is not None else []
    name = blake2b(request.salt.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES).digest()
    names = []
    for identity in request.hash_ids:
        name = blake2b(name + identity.to_bytes(16, "little"), digest_size=NAME_BYTES).digest()
        names.append(BlockHash(name))
    return names
