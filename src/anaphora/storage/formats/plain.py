"""Formats without scales: float32, and floats of 16 bits in pairs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from anaphora.geometry.kv_dtype import PieceFormat
from anaphora.storage.formats.base import Format, as_bytes, no_scales


class Plain(Format):
    """A float of some width; an odd last element has 0 beside it where a unit is a pair."""

    def __init__(self, size: PieceFormat, dtype: torch.dtype) -> None:
        self.size = size
        self._dtype = dtype

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        padded = functional.pad(x, (0, -x.shape[1] % self.size.unit))
        return as_bytes(padded.to(self._dtype)), no_scales(len(x), x.device)

    def decode(self, codes: Tensor, scales: Tensor, dim: int) -> Tensor:
        return codes.contiguous().view(self._dtype)[:, :dim].float()
