"""Anaphora's own request log (`serve --request-log`), as replay/request_log.py writes it; the format stands there."""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as Base64Error

from anaphora.replay.readers.base import BadLine, TraceRequest, json_row, length, peek, seconds
from anaphora.replay.request_log import MARK, NAME_BYTES, VERSION


class AnaphoraLog:
    title, remark = "Anaphora request log", ""

    def __init__(self) -> None:
        self._block_size = 0

    def recognises(self, line: str) -> bool:
        return MARK in peek(line)

    def parse(self, line: str) -> TraceRequest | None:
        row = json_row(line)
        if MARK in row:
            if row[MARK] != VERSION:
                raise BadLine(f"version {row[MARK]!r} of the log; this Anaphora reads version {VERSION}")
            self._block_size = length(row, "block_size")
            return None
        if not self._block_size:
            raise BadLine(f"no line with {MARK!r} before it; a log begins with one")
        tokens = length(row, "input_length")
        blocks = row.get("blocks")
        try:
            packed = b64decode(blocks, validate=True) if isinstance(blocks, str) else b"?"
        except (Base64Error, ValueError):
            packed = b"?"
        if len(packed) % NAME_BYTES:
            raise BadLine("blocks is not base64 of whole block names")
        names = [int.from_bytes(packed[i : i + NAME_BYTES], "little") for i in range(0, len(packed), NAME_BYTES)]
        if len(names) != tokens // self._block_size:
            raise BadLine(f"{tokens:,} tokens do not make {len(names):,} blocks of {self._block_size}")
        arrival, output = seconds(row, "time"), length(row, "output_length")
        return TraceRequest(arrival, tokens, output, names, self._block_size)
