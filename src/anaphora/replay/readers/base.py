"""What every trace reader yields, how its blocks are named, and how lines that cannot be used are counted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from anaphora.blocks.hashing import HashChain, Namespace
from anaphora.errors import InputError
from anaphora.types import BlockHash, TokenIds

MOST_TOKENS = 1 << 31
"""A length from here on is a mistake."""
MOST_SECONDS = 1e12


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. What is not known stays at its default; a trace of lengths alone has no blocks."""

    arrival: float
    """Seconds, from any start: the trace's own clock."""
    input_length: int
    """Tokens of the prompt."""
    output_length: int = 0
    hash_ids: Sequence[int] | None = None
    """Names of the prompt's blocks, each standing for its block and all before it (at most 128 bits each)."""
    block_size: int = 0
    """Tokens one hash id stands for; 0 without hash_ids. The last id may stand for fewer."""
    token_ids: TokenIds | None = None
    """The prompt itself, where the trace has it; the blocks' size is then the replay's to choose."""
    session: str = ""
    """What ties the turns of a conversation together, for reports only: no cache sees it."""
    salt: str = ""
    """Requests share blocks only under the same salt."""

    @property
    def has_blocks(self) -> bool:
        return self.hash_ids is not None or self.token_ids is not None

    def blocks(self, block_size: int) -> list[BlockHash]:
        """The names of the prompt's blocks: 16 bytes each, of `block_size` tokens where the trace has token ids.

        Named blocks come as the trace has them, a partial last one included; of token ids only full blocks.
        """
        if self.hash_ids is not None:
            salt = self.salt.encode("utf-8", "surrogatepass")
            return [BlockHash(i.to_bytes(16, "little") + salt) for i in self.hash_ids]
        chain = HashChain(Namespace("", "", "", "", cache_salt=self.salt).key, block_size)
        chain.extend(self.token_ids or ())
        return chain.hashes


@dataclass(slots=True)
class ReadReport:
    """What a reader found wrong on the way; complete once its stream has ended."""

    lines: int = 0
    requests: int = 0
    malformed: list[tuple[int, str]] = field(default_factory=list)
    """(line number, what is wrong), the first `KEPT` of them."""
    num_malformed: int = 0
    out_of_order: int = 0
    """Requests that arrived, by their own time, before the one above them."""
    format: str = ""
    """Title of the trace's format."""
    remark: str = ""
    """What the trace cannot tell."""

    KEPT = 100

    def reject(self, line: int, why: str, *, strict: bool) -> None:
        """Count a line that cannot be used. Raises InputError when `strict`."""
        if strict:
            raise InputError(f"line {line}: {why}. Correct the trace, or leave out --strict to skip such lines")
        self.num_malformed += 1
        if len(self.malformed) < self.KEPT:
            self.malformed.append((line, why))


class BadLine(Exception):
    """A line that cannot be used, and why; `read_lines` counts it."""


class Reader(Protocol):
    """One format. A reader may remember what stands at the head of a file, so each file has its own."""

    @property
    def title(self) -> str: ...

    @property
    def remark(self) -> str:
        """What the trace cannot tell, after it was read; empty: nothing is missing."""

    def recognises(self, line: str) -> bool:
        """Whether a trace of this format may begin with that line."""

    def parse(self, line: str) -> TraceRequest | None:
        """None: a line that belongs there and is no request. Raises BadLine."""


def read_lines(
    source: Iterable[str], reader: Reader, report: ReadReport, *, strict: bool = False
) -> Iterator[TraceRequest]:
    """One request per line, in the file's order and by its clock; counted in `report`.

    Lines that cannot be used are skipped and noted there. Raises InputError for the first such with `strict`.
    """
    latest = -math.inf
    for number, line in enumerate(source, 1):
        report.lines += 1
        if not line.strip():
            continue
        try:
            request = reader.parse(line)
        except BadLine as error:
            report.reject(number, str(error), strict=strict)
            continue
        if request is None:
            continue
        if request.arrival < latest:
            report.out_of_order += 1
        latest = request.arrival
        report.requests += 1
        yield request


def json_row(line: str) -> dict[str, Any]:
    """Raises BadLine."""
    try:
        line.encode()
        row = json.loads(line)
    except UnicodeEncodeError:
        raise BadLine("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise BadLine(f"no JSON ({error.msg} at character {error.pos + 1})") from None
    except (ValueError, RecursionError) as error:
        raise BadLine(f"no JSON ({error})") from None
    if not isinstance(row, dict):
        raise BadLine("not a JSON object")
    return row


def peek(line: str) -> dict[str, Any]:
    """The JSON object of a line; empty where there is none."""
    try:
        return json_row(line)
    except BadLine:
        return {}


def length(row: Mapping[str, Any], key: str) -> int:
    """A number of tokens. Raises BadLine."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MOST_TOKENS:
        raise BadLine(f"{key} is {value!r}; it must be a whole number of tokens, 0 or more")
    if value != int(value):
        raise BadLine(f"{key} is {value!r}; it must be a whole number")
    return int(value)


def seconds(row: Mapping[str, Any], key: str, unit: float = 1.0) -> float:
    """A time given in units of `unit` seconds. Raises BadLine."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MOST_SECONDS / unit:
        raise BadLine(f"{key} is {value!r}; it must be a number of 0 or more")
    return value * unit


def hash_ids(row: Mapping[str, Any], tokens: int, block_size: int, *, whole_only: bool = False) -> list[int]:
    """The ids of `tokens` tokens' blocks; `whole_only`: a last partial one may have none. Raises BadLine."""
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 128 for i in ids):
        raise BadLine("hash_ids is not a list of whole numbers of 0 or more")
    most = -(-tokens // block_size)
    if len(ids) != most and not (whole_only and len(ids) == tokens // block_size):
        raise BadLine(f"{tokens:,} tokens do not make {len(ids):,} blocks of {block_size}")
    return ids
