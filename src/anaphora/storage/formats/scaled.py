"""One byte per element, and a float16 scale per group of neighbours: int8 and fp8_e4m3.

    scale = fp16(max |x| / largest code)        x = code * scale

The code is made from the scale as stored. int8 is symmetric, -127 .. 127; fp8_e4m3 is the finite OCP format (largest
448, NaN unused), whose error is relative to the element: its scale only has to keep the group within range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anaphora.geometry.kv_dtype import PieceFormat
from anaphora.storage.formats.base import Format, as_bytes, grouped, scale_of

_SMALLEST = 2.0**-24
"""The smallest float16 above 0. A group whose scale would be less is kept as zeros or with this scale."""


class Scaled(Format):
    def __init__(self, size: PieceFormat, dtype: torch.dtype, largest: float) -> None:
        """`dtype`: of a code, one byte wide."""
        self.size = size
        self._dtype = dtype
        self._largest = largest

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = grouped(x, self.size.group)
        scales = scale_of(parts.abs().amax(-1) / self._largest)
        ratios = (parts / scales.float()[..., None].clamp_min(_SMALLEST)).clamp(-self._largest, self._largest)
        if not self._dtype.is_floating_point:
            ratios = ratios.round()
        codes = ratios.to(self._dtype).flatten(1)[:, : x.shape[1]]
        return as_bytes(codes), as_bytes(scales)

    def decode(self, codes: Tensor, scales: Tensor, dim: int) -> Tensor:
        parts = grouped(codes.contiguous().view(self._dtype).float(), self.size.group)
        return (parts * scales.contiguous().view(torch.float16).float()[..., None]).flatten(1)[:, :dim]
