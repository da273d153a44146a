"""Azure's LLM inference traces, CSV: TIMESTAMP,ContextTokens,GeneratedTokens. Lengths only.

2023-11-16 18:15:46.6805900,374,44

https://github.com/Azure/AzurePublicDataset (AzureLLMInferenceDataset2023/2024); Patel et al., Splitwise, ISCA 2024.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from anaphora.replay.readers.base import MOST_TOKENS, BadLine, TraceRequest

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_FRACTION = re.compile(r"(\.\d{6})\d+")
"""Python's datetime takes six digits after the second; the traces have seven."""


class Azure:
    title = "Azure LLM inference"
    remark = "An Azure trace holds lengths only: it does not say which prompts begin alike, so no hit can be told."

    def recognises(self, line: str) -> bool:
        return tuple(cell.strip() for cell in line.split(",")) == COLUMNS

    def parse(self, line: str) -> TraceRequest | None:
        if self.recognises(line):
            return None
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(COLUMNS):
            raise BadLine(f"{len(cells)} columns instead of {len(COLUMNS)} ({','.join(COLUMNS)})")
        try:
            when = datetime.fromisoformat(_FRACTION.sub(r"\1", cells[0]))
        except ValueError:
            raise BadLine(f"{cells[0][:40]!r} is no time such as 2023-11-16 18:15:46.6805900") from None
        tokens = [int(cell) if cell.isdecimal() and cell.isascii() else -1 for cell in cells[1:]]
        if not all(0 <= count < MOST_TOKENS for count in tokens):
            raise BadLine(f"{','.join(cells[1:])[:40]!r} are not two whole numbers of tokens, 0 or more")
        utc = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
        return TraceRequest(utc.timestamp(), tokens[0], tokens[1])
