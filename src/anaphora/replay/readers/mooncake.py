"""Mooncake's JSONL traces: timestamp (ms), input_length, output_length, hash_ids of 512 tokens.

{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ... ]}

https://github.com/kvcache-ai/Mooncake (FAST25-release/traces); the format of the paper, Qin et al., FAST 2025.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

from anaphora.replay.readers.base import ReadReport, TraceRequest, numbered_lines

BLOCK_SIZE = 512


def read_mooncake(source: TextIO, report: ReadReport, *, strict: bool = False) -> Iterator[TraceRequest]:
    """One request per line, in the file's order; arrivals count from the first one.

    A request earlier than the one above it is moved to that one's time and counted in `report.out_of_order`.
    Lines that cannot be used are skipped and noted in `report`. Raises InputError for the first such with `strict`.
    """
    first: float | None = None
    latest = 0.0
    for number, line in numbered_lines(source, report):
        try:
            row = json.loads(line)
        except ValueError as error:
            report.reject(number, f"no JSON ({error})", strict=strict)
            continue
        if (wrong := _what_is_wrong(row)) is not None:
            report.reject(number, wrong, strict=strict)
            continue
        seconds = row["timestamp"] / 1000
        first = seconds if first is None else first
        if seconds - first < latest:
            report.out_of_order += 1
        latest = max(latest, seconds - first)
        report.requests += 1
        yield TraceRequest(latest, row["input_length"], row["output_length"], row["hash_ids"], BLOCK_SIZE)


def _what_is_wrong(row: Any) -> str | None:
    if not isinstance(row, dict):
        return "not a JSON object"
    for key in ("timestamp", "input_length", "output_length"):
        value = row.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
            return f"{key} is {value!r}; it must be a number of 0 or more"
        if key != "timestamp" and value != int(value):
            return f"{key} is {value!r}; it must be a whole number"
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 128 for i in ids):
        return "hash_ids is not a list of whole numbers of 0 or more"
    if len(ids) != -(-row["input_length"] // BLOCK_SIZE):
        return f"{row['input_length']} tokens do not make {len(ids)} blocks of {BLOCK_SIZE}"
    if len(set(ids)) != len(ids):
        return "hash_ids names a block twice, and a block stands for everything before it"
    return None
