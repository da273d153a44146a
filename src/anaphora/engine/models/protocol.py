"""What the model runner asks of a decoder, whichever way it was loaded."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from anaphora.engine.attention import Attend


class Decoder(Protocol):
    """A causal language model without a cache of its own: every layer's keys and values go through `attend`.

    Both methods run under `torch.inference_mode` and keep no state between calls. A token's result depends on
    its own sequence alone: rows of a batch lie one after the other along T and know of each other only through
    `attend`, which keeps them apart.
    """

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, tied ones once."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and of the hidden states."""
        ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids [T] long, positions [T] long (0 = first token of its sequence) -> hidden [T, hidden_size].

        Calls `attend` exactly once per layer. The hidden states are those after the final norm.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden_size] -> [N, vocab_size] float32, soft caps and scales applied."""
        ...
