"""The paged tensors: where the keys and values of every block lie.

    keys   [num_blocks, slots, kv_heads, block_size, key_dim]
    values [num_blocks, slots, kv_heads, block_size, value_dim]

One block is one contiguous piece of each tensor, so that it can be handed to a tier whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from anaphora.errors import ConfigError
from anaphora.geometry.layout import CacheLayout
from anaphora.types import BlockCopy

_ALIGNMENT = 64
"""Bytes; one cache line, and the widest vector load."""


class PagedStorage:
    """Keys and values of `num_blocks` blocks, zero at first. State changes: `copy`, and whoever writes the tensors.

    On a CPU the memory is reserved, not touched: a block takes RAM from its first write on.
    Raises ConfigError when that much cannot be reserved.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.device = device
        self.block_bytes = layout.block_bytes(dtype.itemsize)
        """Bytes of one block, keys and values."""
        shape = (num_blocks, layout.slots, layout.kv_heads, layout.block_size)
        try:
            self.keys = _zeros((*shape, layout.key_dim), dtype, device)
            self.values = _zeros((*shape, layout.value_dim), dtype, device)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"{self.nbytes:,} bytes for {num_blocks} KV blocks cannot be had on {device} ({error}); "
                "give a smaller --kv-memory"
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_bytes

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Views of one layer's (keys, values), each [num_blocks, kv_heads, block_size, dim]."""
        _, slot = self.layout.place(index)
        return self.keys[:, slot], self.values[:, slot]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the first `num_tokens` of each source, all layers; every source is read before any write."""
        staged = [
            (tensor, copy, tensor[copy.src, :, :, : copy.num_tokens].clone())
            for copy in copies
            for tensor in (self.keys, self.values)
        ]
        for tensor, copy, piece in staged:
            tensor[copy.dst, :, :, : copy.num_tokens] = piece


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page; NumPy asks calloc, which maps them on first use.
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[first : first + size]).view(dtype).view(shape)
