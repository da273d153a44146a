"""Mooncake's JSONL traces: timestamp (ms), input_length, output_length, hash_ids of 512 tokens.

{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ... ]}

https://github.com/kvcache-ai/Mooncake (FAST25-release/traces); the format of the paper, Qin et al., FAST 2025.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from anaphora.replay.readers.base import (
    BadLine,
    ReadReport,
    TraceRequest,
    hash_ids,
    json_row,
    length,
    peek,
    read_lines,
    seconds,
)

BLOCK_SIZE = 512


class Mooncake:
    title, remark = "Mooncake", ""

    def recognises(self, line: str) -> bool:
        row = peek(line)
        return {"timestamp", "input_length", "hash_ids"} <= row.keys() and "chat_id" not in row

    def parse(self, line: str) -> TraceRequest:
        row = json_row(line)
        arrival = seconds(row, "timestamp", 0.001)
        tokens, output = length(row, "input_length"), length(row, "output_length")
        ids = hash_ids(row, tokens, BLOCK_SIZE)
        if len(set(ids)) != len(ids):
            raise BadLine("hash_ids names a block twice, and a block stands for everything before it")
        return TraceRequest(arrival, tokens, output, ids, BLOCK_SIZE)


def read_mooncake(source: Iterable[str], report: ReadReport, *, strict: bool = False) -> Iterator[TraceRequest]:
    """`read_lines` of that format."""
    return read_lines(source, Mooncake(), report, strict=strict)
