"""Alibaba's Bailian (Qwen) JSONL traces: timestamp (s), lengths, chats and turns, hash_ids of 16 tokens.

{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132,
 "type": "text", "turn": 2, "hash_ids": [1089, 1090, 1091, 6326, ... ]}

https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon; Wang et al., USENIX ATC 2025. An id there stands for its
16 tokens alone, not for what comes before them; the spool chains all names, so that makes no difference.
"""

from __future__ import annotations

from anaphora.replay.readers.base import TraceRequest, hash_ids, json_row, length, peek, seconds

BLOCK_SIZE = 16


class Bailian:
    title, remark = "Bailian (Qwen)", ""

    def recognises(self, line: str) -> bool:
        return {"chat_id", "timestamp", "input_length", "hash_ids"} <= peek(line).keys()

    def parse(self, line: str) -> TraceRequest:
        row = json_row(line)
        arrival = seconds(row, "timestamp")
        tokens, output = length(row, "input_length"), length(row, "output_length")
        ids = hash_ids(row, tokens, BLOCK_SIZE, whole_only=True)
        return TraceRequest(arrival, tokens, output, ids, BLOCK_SIZE, session=str(row.get("chat_id", "")))
