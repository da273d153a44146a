"""Executes one batch: block copies first, then the step itself, in one of two ways.

NativeDecoder        a whole step in one native call                          models/native_decoder.py
LayerwiseExecutor    a `Decoder`, which hands every layer's query, key and value to an attention backend
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from anaphora.engine.attention import AttentionBackend
from anaphora.engine.batch import Batch
from anaphora.engine.models.protocol import Decoder
from anaphora.storage.paged import PagedStorage


class StepExecutor(Protocol):
    """Computes steps over one storage. Keeps no state between batches but what lies in the storage."""

    def execute(self, batch: Batch) -> Tensor:
        """-> logits [rows with sample=True, vocab_size] float32, in the order of the rows.

        State changes: the storage; after the batch it holds keys and values of every token of every row.
        The copies of the batch have run already.
        """
        ...


class ModelRunner:
    """One executor over one storage."""

    def __init__(self, executor: StepExecutor, storage: PagedStorage) -> None:
        self._executor = executor
        self._storage = storage

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Tensor:
        """Copies, then the step: see StepExecutor.execute."""
        self._storage.copy(batch.copies)
        return self._executor.execute(batch)


class LayerwiseExecutor:
    """See StepExecutor."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend) -> None:
        self._decoder = decoder
        self._attention = attention

    def execute(self, batch: Batch) -> Tensor:
        device = self._decoder.device
        token_ids = torch.tensor([t for row in batch.rows for t in row.token_ids], dtype=torch.long, device=device)
        positions = torch.tensor(
            [p for row in batch.rows for p in range(row.start, row.start + len(row.token_ids))],
            dtype=torch.long,
            device=device,
        )
        hidden = self._decoder.forward(token_ids, positions, self._attention.begin(batch))
        last = []
        end = 0
        for row in batch.rows:
            end += len(row.token_ids)
            if row.sample:
                last.append(end - 1)
        return self._decoder.logits(hidden[torch.tensor(last, dtype=torch.long, device=device)])
