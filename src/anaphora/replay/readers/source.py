"""Lines of a trace file, plain, gzip or zstd, as a stream: nothing is unpacked to disk or held whole."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from anaphora.errors import ConfigError, InputError
from anaphora.replay.readers.base import ReadReport, TraceRequest, read_lines
from anaphora.replay.readers.chats import Tokenize
from anaphora.replay.readers.registry import make_reader, recognise

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

LONGEST_LINE = 256 << 20
"""Characters; a longer one is no trace."""
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_PACKED_BYTES = 16 << 10
_LOOKED_AT = 20
"""Lines from which the format is told."""


def read_trace(
    path: Path, report: ReadReport, *, form: str | None = None, strict: bool = False, tokenize: Tokenize | None = None
) -> Iterator[TraceRequest]:
    """The requests of one file ("-": stdin) in its order; `form`: see registry.FORMATS, None: told from its lines.

    Raises InputError (unreadable, damaged, of no known format, and with `strict` a bad line) and ConfigError.
    """
    with open_lines(path) as lines:
        first = list(islice(lines, _LOOKED_AT))
        reader = make_reader(form, tokenize) if form else recognise(first, str(path), tokenize)
        report.format = reader.title
        yield from read_lines(chain(first, lines), reader, report, strict=strict)
        report.remark = reader.remark


@contextmanager
def open_lines(path: Path) -> Iterator[Iterator[str]]:
    """Text lines; bytes that are no UTF-8 become lone surrogates, which no JSON line may hold."""
    with ExitStack() as opened:
        try:
            raw = sys.stdin.buffer if str(path) == "-" else opened.enter_context(path.open("rb"))
            source = io.BufferedReader(cast(io.RawIOBase, raw)) if not isinstance(raw, io.BufferedReader) else raw
            packed = opened.enter_context(_unpacked(source))
            text = io.TextIOWrapper(packed, "utf-8-sig", "surrogateescape")
            yield _limited(text, path)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{path} is damaged or cut short: {error}. Copy it again") from None
        except OSError as error:
            raise InputError(
                f"{path} cannot be read: {error.strerror or error}; name a file that this user can read"
            ) from None


@contextmanager
def _unpacked(source: io.BufferedReader) -> Iterator[BinaryIO]:
    head = source.peek(4)[:4]
    if head.startswith(_GZIP):
        with gzip.open(source) as plain:
            yield cast(BinaryIO, plain)
    elif head == _ZSTD:
        yield io.BufferedReader(_Zstd(source))
    else:
        yield source


class _Zstd(io.RawIOBase):
    """Frames one after the other. The library's own stream reader takes a file that was cut short for a whole one."""

    def __init__(self, source: io.BufferedReader) -> None:
        try:
            from zstandard import ZstdDecompressor
        except ImportError:
            raise ConfigError(
                "reading .zst needs the package zstandard: pip install 'anaphora[replay]', or unpack the trace first"
            ) from None
        self._source = source
        self._start = ZstdDecompressor().decompressobj
        self._frame = self._start()
        self._begun = False
        self._packed = self._plain = b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: WriteableBuffer) -> int:
        """Raises EOFError (cut short, damaged)."""
        from zstandard import ZstdError

        while not self._plain:
            packed = self._packed or self._source.read(_PACKED_BYTES)
            if not packed:
                if self._begun:
                    raise EOFError("the last zstd frame has no end")
                return 0
            try:
                self._plain = self._frame.decompress(packed)
            except ZstdError as error:
                raise EOFError(str(error)) from None
            self._packed, self._begun = b"", not self._frame.eof
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, self._start()
        view = memoryview(target)
        taken, self._plain = self._plain[: len(view)], self._plain[len(view) :]
        view[: len(taken)] = taken
        return len(taken)


def _limited(text: io.TextIOWrapper, path: Path) -> Iterator[str]:
    while line := text.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise InputError(f"{path} has a line of more than {LONGEST_LINE:,} characters; it is no trace")
        yield line
