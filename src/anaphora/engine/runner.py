"""Executes one batch: block copies first, then the step itself, in one of two ways.

NativeDecoder        a whole step in one native call                          models/native_decoder.py
LayerwiseExecutor    a `Decoder`, which hands every layer's query, key and value to an attention backend
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anaphora.engine.attention import AttentionBackend
from anaphora.engine.batch import Batch
from anaphora.engine.models.protocol import Decoder
from anaphora.storage.paged import PagedStorage
from anaphora.types import BlockCopy


class StepLogits(NamedTuple):
    """After the tokens that are wanted (Batch.wanted), in their order."""

    logits: Tensor
    """[N, vocab_size] float32"""
    best: NDArray[np.int64] | None
    """[N]: the lowest token id of each row's largest logit, where the executor knows it; NaN counts as largest."""


Compute = Callable[[], StepLogits]
"""State changes: the storage; afterwards it holds keys and values of every token of every row."""


class StepExecutor(Protocol):
    """Computes steps over one storage. Keeps no state between batches but what lies in the storage."""

    def begin(self, batch: Batch) -> Compute:
        """Prepare the step; the result is called once, after the batch's copies."""
        ...


class ModelRunner:
    """One executor over one storage."""

    def __init__(self, executor: StepExecutor, storage: PagedStorage) -> None:
        self.executor = executor
        self._storage = storage

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """See PagedStorage.copy."""
        self._storage.copy(copies)

    @torch.inference_mode()
    def step(self, batch: Batch) -> StepLogits:
        """Copies, then the step: see Compute."""
        self.copy(batch.copies)
        return self.executor.begin(batch)()

    def execute(self, batch: Batch) -> Tensor:
        """`step`, its logits alone."""
        return self.step(batch).logits


class LayerwiseExecutor:
    """See StepExecutor."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend) -> None:
        self._decoder = decoder
        self._attention = attention

    def begin(self, batch: Batch) -> Compute:
        def tensor(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.long, device=self._decoder.device)

        token_ids, positions, wanted = tensor(batch.token_ids), tensor(batch.positions), tensor(batch.wanted)
        attend = self._attention.begin(batch)

        def compute() -> StepLogits:
            hidden = self._decoder.forward(token_ids, positions, attend)
            return StepLogits(self._decoder.logits(hidden[wanted]), None)

        return compute
