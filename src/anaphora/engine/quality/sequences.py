"""Sequences in a paged storage of their own, and the executor that computes them: one stored form under study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from anaphora.engine.batch import Batch, BatchRow
from anaphora.engine.runner import ModelRunner, StepExecutor, StepLogits
from anaphora.storage.codec import Codec
from anaphora.storage.paged import PagedStorage
from anaphora.types import BlockCopy, BlockId, RequestId


@dataclass(frozen=True, slots=True)
class Subject:
    """A stored form of one loaded model."""

    name: str
    codec: Codec
    executor: Callable[[PagedStorage], StepExecutor]
    device: torch.device

    def blocks(self, count: int, length: int) -> int:
        return count * len(self.codec.layout.groups) * -(-length // self.codec.layout.block_size)

    def nbytes(self, count: int, length: int) -> int:
        """Bytes of `count` sequences of up to `length` tokens."""
        return self.blocks(count, length) * self.codec.block_bytes

    def open(self, count: int, length: int) -> Sequences:
        """Raises ConfigError when the memory cannot be had."""
        return Sequences(self, count, length)


class Sequences:
    """`count` sequences of up to `length` tokens; they share nothing. State changes: `step` and `fork`, the storage."""

    def __init__(self, subject: Subject, count: int, length: int) -> None:
        layout = subject.codec.layout
        storage = PagedStorage(subject.codec, subject.blocks(count, length), subject.device)
        self._runner = ModelRunner(subject.executor(storage), storage)
        self._block_size = layout.block_size
        self._copies: tuple[BlockCopy, ...] = ()
        groups, per_group = len(layout.groups), -(-length // layout.block_size)
        tables = [
            tuple(map(BlockId, range(first, first + per_group)))
            for first in range(0, count * groups * per_group, per_group)
        ]
        self._tables = [tuple(tables[first : first + groups]) for first in range(0, len(tables), groups)]

    def step(
        self, tokens: Sequence[Sequence[int]], start: int, *, sample: bool = True, every: bool = False
    ) -> StepLogits:
        """Compute tokens[i], at positions `start` and on, as sequence i. See Batch for `sample` and `every`."""
        rows = tuple(
            BatchRow(RequestId(str(number)), tuple(ids), start, table, sample)
            for number, (ids, table) in enumerate(zip(tokens, self._tables, strict=False))
        )
        copies, self._copies = self._copies, ()
        return self._runner.step(Batch(rows, copies, every))

    def prefill(self, tokens: Sequence[int], chunk: int) -> int:
        """Compute all of `tokens` as the first sequence, in chunks; -> the likeliest next one."""
        for begin in range(0, len(tokens), chunk):
            end = begin + chunk
            logits = self.step([tokens[begin:end]], begin, sample=end >= len(tokens)).logits
        return int(logits[-1].argmax())

    def fork(self) -> None:
        """Every sequence is a copy of the first from the next step on."""
        first, *others = [[block for group in table for block in group] for table in self._tables]
        self._copies = tuple(
            BlockCopy(src, dst, self._block_size) for other in others for src, dst in zip(first, other, strict=True)
        )
