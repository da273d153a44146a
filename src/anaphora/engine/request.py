"""One sequence in the engine: its tokens, its blocks, how far it has come."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from enum import Enum

from anaphora.blocks.hashing import HashChain
from anaphora.blocks.manager import BlockTable
from anaphora.engine.outcome import TokenSources
from anaphora.engine.output_text import OutputText
from anaphora.engine.params import SamplingParams
from anaphora.types import NULL_BLOCK, BlockHash, RequestId


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class TableArrays:
    """A block table as arrays of 32-bit integers, kept up from step to step: only what is new is converted."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._groups = [array("i") for _ in table.groups]
        self._passed = [0] * len(table.groups)

    def snapshot(self) -> tuple[array[int], ...]:
        """Copies of the table's groups as they are now. State changes: the arrays follow the table."""
        table = self._table
        for group, (ours, blocks) in enumerate(zip(self._groups, table.groups, strict=True)):
            if len(ours) < len(blocks):
                ours.extend(blocks[len(ours) :])
            for i in range(self._passed[group], table.first[group]):
                ours[i] = NULL_BLOCK
            self._passed[group] = table.first[group]
        return tuple([ours[:] for ours in self._groups])


class Request:
    """Tokens are append-only; `num_computed_tokens` counts the leading ones whose KV lies in `table`."""

    def __init__(
        self,
        request_id: RequestId,
        arrival: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        seed: int,
        chain: HashChain,
        text: OutputText,
        pin_seconds: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.arrival = arrival
        """Order of arrival: the lower one goes first, and is preempted last."""
        self.prompt_ids = tuple(prompt_ids)
        self.output_ids: list[int] = []
        self.tokens: list[int] = list(prompt_ids)
        """Prompt and output."""
        self.params = params
        self.max_tokens = max_tokens
        self.seed = seed
        self.chain = chain
        self.text = text
        self.pin_seconds = pin_seconds
        """How long its blocks are kept once it has ended, if there is room for pins; 0 = like all others."""
        self.status = Status.WAITING
        self.table: BlockTable | None = None
        self.table_arrays: TableArrays | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        """Prompt tokens reused at first admission; None until then."""
        self.sources = TokenSources()
        self.unloaded_tokens = 0
        """Prompt tokens that a tier was asked for and did not bring, or not in time."""
        self.waited_for: RequestId | None = None
        """The request whose blocks this one waited for, the last of them if there were several."""
        self.waits_for: BlockHash | None = None
        """The block that another request is computing, or a tier is loading, just now, and this one will use."""
        self.arrival_time = time.monotonic()
        self.admission_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None

    def take_table(self, table: BlockTable) -> None:
        """The blocks that this request runs in, until `drop_table`."""
        self.table = table
        self.table_arrays = TableArrays(table)

    def drop_table(self) -> None:
        self.table = self.table_arrays = None

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is not computed yet: 1 while decoding, more while catching up."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def reused(self) -> dict[str, int]:
        """Prompt tokens that were not computed, by where they came from."""
        return {name: source.tokens for name, source in self.sources.items() if name != "computed" and source.tokens}

    @property
    def seconds(self) -> dict[str, float]:
        """How long every source took; from arrival to admission, to the first token and until now."""
        spent = {name: source.seconds for name, source in self.sources.items() if source.tokens}
        marks = {"queue": self.admission_time, "ttft": self.first_token_time, "e2e": time.monotonic()}
        return spent | {name: mark - self.arrival_time for name, mark in marks.items() if mark is not None}

    def append(self, token_id: int) -> None:
        self.output_ids.append(token_id)
        self.tokens.append(token_id)
