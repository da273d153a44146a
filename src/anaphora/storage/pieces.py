"""One layer's keys, or values, of all blocks: where a token's codes and scales lie, and how they are written and read.

    block = slot 0 | slot 1 | ...
    slot  = head 0: key piece, value piece | head 1: key piece, value piece | ...
    piece = codes | scales

    key piece     codes [units][block_size][unit_bytes]     scales [groups][block_size][group_bytes]
    value piece   codes [block_size][units][unit_bytes]     scales [block_size][groups][group_bytes]

Keys have the token as their fast axis: a kernel loads one unit of many tokens at once and multiplies it by q[d]. Values
have the dimension as theirs: a kernel loads many units of one token and multiplies them by p[t]. Either way a token's
bytes are its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anaphora.geometry.layout import CacheLayout
from anaphora.storage.codec import LayerCodec
from anaphora.storage.formats.base import Format

_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def layer_pieces(data: Tensor, codec: LayerCodec, layout: CacheLayout) -> tuple[Pieces, Pieces]:
    """(keys, values) of a layer in data [num_blocks, block_bytes] uint8."""
    head_bytes = codec.key_bytes + codec.value_bytes
    slot = data[:, codec.offset : codec.offset + layout.kv_heads * head_bytes]
    heads = slot.view(-1, layout.kv_heads, head_bytes)
    return (
        Pieces(heads[..., : codec.key_bytes], codec.key, layout.key_dim, layout.block_size, token_fast=True),
        Pieces(heads[..., codec.key_bytes :], codec.value, layout.value_dim, layout.block_size, token_fast=False),
    )


class Pieces:
    """Views of the storage; no state of its own."""

    def __init__(self, pieces: Tensor, form: Format, dim: int, block_size: int, *, token_fast: bool) -> None:
        """pieces: uint8 [num_blocks, kv_heads, piece_bytes], strided."""
        self._form = form
        self._dim = dim
        size = form.size
        codes = size.code_bytes(dim) * block_size
        self._codes = _Part(pieces[..., :codes], size.unit_bytes, block_size, token_fast=token_fast)
        self._scales = _Part(pieces[..., codes:], size.group_bytes, block_size, token_fast=token_fast)

    def write(self, blocks: Tensor, offsets: Tensor, x: Tensor) -> None:
        """Keep x [T, kv_heads, dim] as tokens `offsets` [T] of `blocks` [T]. State changes: the storage."""
        codes, scales = self._form.encode(x.flatten(0, 1).float())
        self._codes.put(blocks, offsets, codes)
        self._scales.put(blocks, offsets, scales)

    def read(self, blocks: Tensor) -> Tensor:
        """blocks [n] -> [n, kv_heads, block_size, dim] float32."""
        codes, scales = self._codes.take(blocks), self._scales.take(blocks)
        decoded = self._form.decode(codes.flatten(0, 2), scales.flatten(0, 2), self._dim)
        return decoded.view(*codes.shape[:3], self._dim)


class _Part:
    """The codes, or the scales, of pieces. Bytes are moved in the widest words that the layout allows."""

    def __init__(self, part: Tensor, unit_bytes: int, block_size: int, *, token_fast: bool) -> None:
        """part: uint8 [num_blocks, kv_heads, nbytes], strided."""
        width = math.gcd(unit_bytes, part.storage_offset(), *part.stride()[:2], 4)
        units, words = part.shape[2] // (block_size * unit_bytes), unit_bytes // width
        self._flat = part.view(_WORDS[width])
        self._token_fast = token_fast
        if token_fast:  # [num_blocks, kv_heads, units, block_size, words]
            self._shaped = self._flat.view(*part.shape[:2], units, block_size, words)
        else:  # [num_blocks, kv_heads, block_size, units * words]
            self._shaped = self._flat.view(*part.shape[:2], block_size, units * words)

    def put(self, blocks: Tensor, offsets: Tensor, rows: Tensor) -> None:
        """rows: uint8 [T * kv_heads, row_bytes]."""
        if not rows.shape[1]:
            return
        words = rows.view(self._flat.dtype)
        _, heads, *shape = self._shaped.shape
        if self._token_fast:
            self._shaped[blocks, :, :, offsets] = words.view(-1, heads, shape[0], shape[2])
        else:
            self._shaped[blocks, :, offsets] = words.view(-1, heads, shape[1])

    def take(self, blocks: Tensor) -> Tensor:
        """-> uint8 [n, kv_heads, block_size, row_bytes]; a copy."""
        taken = self._flat.index_select(0, blocks).view(len(blocks), *self._shaped.shape[1:])
        if self._token_fast:
            taken = taken.transpose(2, 3).flatten(3).contiguous()
        return taken.view(torch.uint8)
