"""What every trace reader yields, and how its blocks are named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from anaphora.blocks.hashing import HashChain, Namespace
from anaphora.errors import InputError
from anaphora.types import BlockHash, TokenIds


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. What is not known stays at its default; a trace of lengths alone has no blocks."""

    arrival: float
    """Seconds since the trace began; never less than the request's before."""
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

    KEPT = 100

    def reject(self, line: int, why: str, *, strict: bool) -> None:
        """Count a line that cannot be used. Raises InputError when `strict`."""
        if strict:
            raise InputError(f"line {line}: {why}. Correct the trace, or leave out --strict to skip such lines")
        self.num_malformed += 1
        if len(self.malformed) < self.KEPT:
            self.malformed.append((line, why))


def numbered_lines(source: TextIO, report: ReadReport) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1."""
    for number, line in enumerate(source, 1):
        report.lines = number
        if line.strip():
            yield number, line
