"""Executes one batch: copies, forward, logits of the rows that want them."""

from __future__ import annotations

import torch
from torch import Tensor

from anaphora.engine.attention import AttentionBackend, TorchAttention
from anaphora.engine.batch import Batch
from anaphora.engine.models.protocol import Decoder
from anaphora.geometry.layout import CacheLayout
from anaphora.storage.paged import PagedStorage


class ModelRunner:
    """One decoder over one storage. Keeps no state between batches but what lies in the storage."""

    def __init__(
        self,
        decoder: Decoder,
        storage: PagedStorage,
        layout: CacheLayout,
        attention: AttentionBackend | None = None,
    ) -> None:
        """`attention` is the torch reference backend when not given."""
        if storage.layout != layout:
            raise ValueError("the storage was made for another layout")
        self._decoder = decoder
        self._storage = storage
        self._attention = attention or TorchAttention(storage)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Tensor:
        """-> logits [rows with sample=True, vocab_size] float32, in the order of the rows.

        State changes: the storage; after the batch it holds keys and values of every token of every row.
        """
        self._storage.copy(batch.copies)
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
