"""Four bits per element: values in small groups, keys with a few wide elements.

An element is (code - 8) * scale, code 0 .. 15; in a byte the even element has the low bits. The scale carries a sign:
the largest element of its group becomes -8, so that all sixteen codes are of use (as llama.cpp's q4_0 does). Some
other sizes of the scale are tried beside it; the one with the least squared error stays.

Values have a scale of one byte, fp8_e4m3, for every 8: twice as many of half the size err less than float16 for 16.
The transform sees to it that values are about 1 (`storage/transform.py`).

Keys come sorted by what their error costs, again from the transform. The first eighth has a byte per element, in steps
of an eighth of the token's one float16 scale, so that a kernel multiplies by it once per token:

    x = scale * (code / 8)       wide elements, code -127 .. 127
    x = scale * (code - 8)       the others
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from anaphora.geometry.kv_dtype import PieceFormat
from anaphora.storage.formats.base import Format, as_bytes, grouped, scale_of

_SIZES = (1.06, 0.94, 0.88, 0.82, 0.76, 0.7)
"""Of a scale, beside 1: tried in this order, a later one must be better."""
_WIDE_STEP = 0.125
_WIDE_LARGEST = 127


class Nibbles(Format):
    """int4 values."""

    _SCALE = torch.float8_e4m3fn

    def __init__(self, size: PieceFormat) -> None:
        self.size = size

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = grouped(x, self.size.group)
        best = _best(parts, parts[..., :0], self._SCALE)
        return _pack(best.codes.flatten(1)[:, : x.shape[1]]), as_bytes(best.scales)

    def decode(self, codes: Tensor, scales: Tensor, dim: int) -> Tensor:
        floats = scales.contiguous().view(self._SCALE).float()[..., None]
        return (grouped(_unpack(codes), self.size.group) * floats).flatten(1)[:, :dim]


class NibblesWithWide(Format):
    """int4 keys."""

    def __init__(self, size: PieceFormat) -> None:
        self.size = size

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = self.size.wide_dims(x.shape[1])
        best = _best(x[:, None, wide:], x[:, None, :wide], torch.float16)
        codes = [as_bytes(best.wide[:, 0].to(torch.int8)), _pack(best.codes[:, 0])]
        return torch.cat(codes, dim=1), as_bytes(best.scales)

    def decode(self, codes: Tensor, scales: Tensor, dim: int) -> Tensor:
        wide = self.size.wide_dims(dim)
        steps = [codes[:, :wide].contiguous().view(torch.int8) * _WIDE_STEP, _unpack(codes[:, wide:])]
        return torch.cat(steps, dim=1)[:, :dim] * scales.contiguous().view(torch.float16).float()


class _Coded(NamedTuple):
    codes: Tensor
    """[N, groups, n] whole floats -8 .. 7"""
    wide: Tensor
    """[N, groups, w] whole floats -127 .. 127"""
    scales: Tensor
    """[N, groups] as stored"""
    error: Tensor
    """[N, groups] squared"""

    def or_better(self, other: _Coded) -> _Coded:
        better = (other.error < self.error)[..., None]
        return _Coded(
            torch.where(better, other.codes, self.codes),
            torch.where(better, other.wide, self.wide),
            # torch.where does not know 8 bits wide floats
            torch.where(better[..., 0], other.scales.float(), self.scales.float()).to(self.scales.dtype),
            torch.minimum(other.error, self.error),
        )


def _best(parts: Tensor, wide: Tensor, scale_dtype: torch.dtype) -> _Coded:
    """parts [N, groups, n] and wide [N, groups, w] under one scale."""
    extreme = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))[..., 0]
    least = torch.zeros_like(extreme)
    if wide.shape[-1]:
        least = wide.abs().amax(-1) / (_WIDE_LARGEST * _WIDE_STEP)
    best = _coded(parts, wide, extreme / -8, least, scale_dtype)
    for size in _SIZES:
        best = best.or_better(_coded(parts, wide, extreme * (size / -8), least, scale_dtype))
    return best


def _coded(parts: Tensor, wide: Tensor, scale: Tensor, least: Tensor, scale_dtype: torch.dtype) -> _Coded:
    """With the scale given, or one of its sign and of size `least` [N, groups], which the wide elements need."""
    scales = scale_of(torch.where(scale.abs() < least, torch.where(scale < 0, -least, least), scale), scale_dtype)
    divisor = scales.float()[..., None]
    divisor = torch.where(divisor == 0, torch.finfo(scale_dtype).smallest_normal, divisor)
    codes = (parts / divisor).round().clamp(-8, 7)
    wide_codes = (wide / (divisor * _WIDE_STEP)).round().clamp(-_WIDE_LARGEST, _WIDE_LARGEST)
    stored = scales.float()[..., None]
    error = torch.cat([codes * stored - parts, wide_codes * _WIDE_STEP * stored - wide], dim=-1).square()
    return _Coded(codes, wide_codes, scales, _sum(error))


def _sum(x: Tensor) -> Tensor:
    """Over the last axis, by halves: an order that no batch changes."""
    while (n := x.shape[-1]) > 1:
        x = functional.pad(x, (0, n % 2))
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x[..., 0]


def _pack(codes: Tensor) -> Tensor:
    """[N, n] whole floats -8 .. 7, n even -> [N, n / 2] uint8."""
    nibbles = (codes + 8).to(torch.uint8)
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4


def _unpack(codes: Tensor) -> Tensor:
    """[N, n / 2] uint8 -> [N, n] float32 -8 .. 7."""
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).float() - 8
