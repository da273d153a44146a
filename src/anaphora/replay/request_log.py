"""`serve --request-log FILE`: what was asked, without the text, for `anaphora replay` and `anaphora sweep`.

JSONL. A head stands first in every file, and again after each start of the server; then one line per request:

    {"anaphora_request_log": 1, "block_size": 16, "model": "...", "started": 1764442000.0}
    {"time": 1764442003.25, "input_length": 1000, "output_length": 200, "blocks": "fJ3q...", "hit": {"pool": 992},
     "ttft": 0.12, "e2e": 3.4, "outcome": "stop", ...}

    time      arrival, seconds since 1970            hit   tokens not computed, by where they came from
    ttft, e2e seconds, null where there was none     ...   what else the server has to say (causes of misses)
    blocks    base64 of NAME_BYTES bytes per full block of the prompt, from its start: BLAKE2b of the block's hash under
              a key of this log's own, cut short. Equal prefixes have equal names, and nothing can be guessed from
              them without the key, which lies in FILE.key, so that restarts do not tear the trace. Give away the log,
              never the key.

The log of the next version may have more keys; what a reader does not know it leaves alone.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Lock, Thread
from typing import Any

from anaphora.errors import ConfigError

log = logging.getLogger(__name__)

MARK = "anaphora_request_log"
VERSION = 1
NAME_BYTES = 8
_KEY_BYTES = 32
_WAITING = 4096
"""Requests that may wait for the disk; more are dropped, counted."""
_REST_SECONDS = 30.0
"""How long nothing is written after the disk refused."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that is over."""

    time: float
    """Arrival, seconds since 1970."""
    input_length: int
    output_length: int
    blocks: Sequence[bytes]
    """Hashes of the prompt's full blocks, from its start."""
    hit: Mapping[str, int]
    """Tokens by source: pool, ram, disk, remote."""
    outcome: str
    """The finish reason, or "abort" or "error"."""
    ttft: float | None = None
    e2e: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further keys, JSON; no text of the prompt unless the user asked for it."""


class RequestLogWriter:
    """Appends to `path`, and to a new file each time that one would pass `max_bytes`; `backups` old ones are kept.

    FILE is renamed to FILE.1, that to FILE.2 and so on. All are readable by their owner only. `write` never blocks
    and never raises: a thread does the work, and what a full disk refuses is dropped, counted, and said once.
    """

    def __init__(
        self, path: Path, max_bytes: int = 256 << 20, backups: int = 4, *, block_size: int = 16, model: str = ""
    ) -> None:
        """Raises ConfigError when the file cannot be opened now."""
        self.path = path
        self.dropped = 0
        """Requests that are not in the log."""
        self._max_bytes, self._backups = max_bytes, backups
        self._head = {"block_size": block_size, "model": model}
        self._queue: Queue[RequestRecord | None] = Queue(_WAITING)
        self._count = Lock()
        self._file = -1
        self._size = self._head_bytes = 0
        self._off_until = 0.0
        self._closed = False
        try:
            self._key = _key(path.with_name(path.name + ".key"))
            self._open()
        except OSError as error:
            raise ConfigError(
                f"--request-log {path}: {error.strerror}; give a file in a folder that can be written"
            ) from None
        self._thread = Thread(target=self._work, name="request-log", daemon=True)
        self._thread.start()

    def write(self, record: RequestRecord) -> None:
        """Leave a record for the log. Immediate, from any thread."""
        try:
            if self._closed:
                raise Full
            self._queue.put_nowait(record)
        except Full:
            self._drop()

    def close(self, timeout: float = 5.0) -> None:
        """Write what waits, within `timeout` seconds, and close the file. Harmless when done twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self._queue.put(None, timeout=timeout)
        except Full:
            return
        self._thread.join(timeout)

    # On the log's thread

    def _work(self) -> None:
        while (record := self._queue.get()) is not None:
            if time.monotonic() < self._off_until:
                self._drop()
                continue
            try:
                self._append(self._line(record))
            except OSError as error:
                self._drop()
                self._off_until = time.monotonic() + _REST_SECONDS
                log.warning("%s: %s; no request is logged for %.0f s", self.path, error.strerror, _REST_SECONDS)
            except Exception:  # a record that is no JSON; the server goes on
                self._drop()
                log.exception("a request could not be logged; this is a bug of Anaphora's")
        while True:  # what came after the end
            try:
                self._queue.get_nowait()
            except Empty:
                break
            self._drop()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _line(self, record: RequestRecord) -> bytes:
        start = blake2b(digest_size=NAME_BYTES, key=self._key)
        names = bytearray()
        for block in record.blocks:
            digest = start.copy()
            digest.update(block)
            names += digest.digest()
        row = {
            "time": round(record.time, 6),
            "input_length": record.input_length,
            "output_length": record.output_length,
            "blocks": b64encode(names).decode("ascii"),
            "hit": dict(record.hit),
            "ttft": record.ttft,
            "e2e": record.e2e,
            "outcome": record.outcome,
            **record.more,
        }
        return json.dumps(row, separators=(",", ":")).encode() + b"\n"

    def _append(self, line: bytes) -> None:
        """Raises OSError; then nothing of the line is in the file, as far as the disk lets us."""
        if self._file < 0:
            self._open()
        elif self._size + len(line) > self._max_bytes and self._size > self._head_bytes:
            self._rotate()
        try:
            _write_all(self._file, line)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)

    def _rotate(self) -> None:
        os.close(self._file)
        self._file = -1
        for number in range(self._backups, 0, -1):
            older = self._old(number - 1)
            if older.exists():
                older.replace(self._old(number))
        if not self._backups:
            self.path.unlink(missing_ok=True)
        self._open()

    def _old(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def _open(self) -> None:
        """Open for appending, and write the head; a line that a kill cut short is ended first."""
        file = _private(self.path)
        try:
            size = os.fstat(file).st_size
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            head = json.dumps({MARK: VERSION, **self._head, "started": round(time.time(), 6)}).encode() + b"\n"
            _write_all(file, b"\n" + head if torn else head)
        except OSError:
            os.close(file)
            raise
        self._file, self._head_bytes = file, len(head)
        self._size = os.fstat(file).st_size

    def _drop(self) -> None:
        with self._count:
            self.dropped += 1


def _private(path: Path) -> int:
    """A descriptor to append to and read, the file readable by its owner only."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(file, 0o600)
    except OSError:
        os.close(file)
        raise
    return file


def _key(path: Path) -> bytes:
    """The log's key, made at its first use."""
    file = _private(path)
    try:
        key = os.pread(file, _KEY_BYTES, 0)
        if len(key) < _KEY_BYTES:
            os.ftruncate(file, 0)
            key = secrets.token_bytes(_KEY_BYTES)
            _write_all(file, key)
    finally:
        os.close(file)
    return key


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
