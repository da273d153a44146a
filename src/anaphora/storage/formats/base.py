"""What a stored form of keys or values is.

A format is stateless per token: a token's bytes depend on that token alone (and on constants of the model, see
`storage/calibration.py`). So copying the first n tokens of a block, chunking, sharing and tiers change no bit.
Where a token's codes and scales lie in a block: `storage/pieces.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from anaphora.geometry.kv_dtype import PieceFormat


class Format(ABC):
    """Turns vectors into bytes and back. Has no state."""

    size: PieceFormat

    @abstractmethod
    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, dim] float32 -> (codes [N, code_bytes], scales [N, scale_bytes]), both uint8.

        Row i of the result depends on row i of x alone. What NaN or infinity become is not defined: the caller
        looks for them first (`LayerCodec.before`).
        """

    @abstractmethod
    def decode(self, codes: Tensor, scales: Tensor, dim: int) -> Tensor:
        """codes [N, code_bytes], scales [N, scale_bytes], uint8 -> [N, dim] float32: the numbers the kernels make."""


def as_bytes(x: Tensor) -> Tensor:
    """[N, n] of any dtype -> [N, n * itemsize] uint8."""
    return x.contiguous().view(torch.uint8)


def no_scales(rows: int, device: torch.device) -> Tensor:
    return torch.empty((rows, 0), dtype=torch.uint8, device=device)


def grouped(x: Tensor, group: int) -> Tensor:
    """[N, dim] -> [N, groups, group], the last group filled up with zeros; a group is never longer than dim."""
    group = min(group, x.shape[1])
    padded = functional.pad(x, (0, -x.shape[1] % group))
    return padded.view(len(x), padded.shape[1] // group, group)


def scale_of(x: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """As stored; the largest finite number where x is beyond it."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)
