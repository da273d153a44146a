"""The paged storage: where the keys and values of every block lie.

    data [num_blocks, block_bytes]      bytes; what they mean is the codec's affair (storage/codec.py)

One block is one contiguous piece of memory, so that it is handed to a tier, or copied, as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from anaphora.errors import ConfigError
from anaphora.storage.codec import Codec
from anaphora.storage.pieces import Pieces, layer_pieces
from anaphora.types import BlockCopy, BlockId

_ALIGNMENT = 4096
"""Bytes; one page, from and to which tiers read and write without a copy."""


class PagedStorage:
    """Keys and values of `num_blocks` blocks, zero at first. State changes: `write`, `copy`, and native kernels.

    On a CPU the memory is reserved, not touched: a block takes RAM from its first write on.
    Raises ConfigError when that much cannot be reserved.
    """

    def __init__(self, codec: Codec, num_blocks: int, device: torch.device) -> None:
        self.codec = codec
        self.layout = codec.layout
        self.num_blocks = num_blocks
        self.device = device
        try:
            self.data = _zeros(num_blocks, codec.block_bytes, device)
            """uint8 [num_blocks, block_bytes]"""
        except (MemoryError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"{self.nbytes:,} bytes for {num_blocks} KV blocks cannot be had on {device} ({error}); "
                "give a smaller --kv-memory"
            ) from error
        self._layers: dict[int, tuple[Pieces, Pieces]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.codec.block_bytes

    def block(self, block: BlockId) -> Tensor:
        """The bytes of one block: a view, uint8 [block_bytes]."""
        return self.data[block]

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keep keys [T, kv_heads, key_dim] and values [T, kv_heads, value_dim] as tokens `offsets` [T] of `blocks` [T].

        State changes: those tokens' bytes of that layer.
        """
        ours = self._layer(layer)
        for pieces, new in zip(ours, (keys, values), strict=True):
            pieces.write(blocks, offsets, new)

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """blocks [..., n] -> (keys, values) float32 [..., kv_heads, n * block_size, dim], in the blocks' order."""
        keys, values = (_by_head(pieces.read(blocks.flatten()), blocks.shape) for pieces in self._layer(layer))
        return keys, values

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks; every source is read before any write.

        What lies behind a copy's first `num_tokens` tokens comes along: it is as meaningless as what was there.
        """
        if copies:
            src, dst = (torch.tensor([getattr(c, end) for c in copies], device=self.device) for end in ("src", "dst"))
            self.data.index_copy_(0, dst, self.data.index_select(0, src))

    def _layer(self, index: int) -> tuple[Pieces, Pieces]:
        if index not in self._layers:
            self._layers[index] = layer_pieces(self.data, self.codec.layer(index), self.layout)
        return self._layers[index]


def _by_head(read: Tensor, blocks: torch.Size) -> Tensor:
    """[blocks, kv_heads, block_size, dim] -> [..., kv_heads, n * block_size, dim]"""
    return read.view(*blocks, *read.shape[1:]).transpose(-4, -3).flatten(-3, -2)


def _zeros(num_blocks: int, block_bytes: int, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)
    # torch.zeros writes every page; NumPy asks calloc, which maps them on first use.
    size = num_blocks * block_bytes
    raw = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[first : first + size]).view(num_blocks, block_bytes)
