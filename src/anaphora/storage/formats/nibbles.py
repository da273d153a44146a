"""Four bits per element: values in groups, keys with a few wide elements.

An element is (code - 8) * scale, code 0 .. 15; in a byte the even element has the low bits. The scale carries a sign:
the largest element of its group becomes -8, so that all sixteen codes are of use (as llama.cpp's q4_0 does). Some
shrunken scales are tried beside it, which clip that element; the one with the least squared error stays.

Keys come sorted by what their error costs (`storage/transform.py`). The first eighth has a byte per element, in steps
of an eighth of the one scale, so that a kernel multiplies once per token:

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

_SHRINK = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
_SMALLEST = 2.0**-24
_WIDE_STEP = 0.125
_WIDE_LARGEST = 127


class Nibbles(Format):
    """int4 values."""

    def __init__(self, size: PieceFormat) -> None:
        self.size = size

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = grouped(x, self.size.group)
        best = _best(parts, parts[..., :0])
        return _pack(best.codes.flatten(1)[:, : x.shape[1]]), as_bytes(best.scales)

    def decode(self, codes: Tensor, scales: Tensor, dim: int) -> Tensor:
        return (grouped(_unpack(codes), self.size.group) * _floats(scales)).flatten(1)[:, :dim]


class NibblesWithWide(Format):
    """int4 keys."""

    def __init__(self, size: PieceFormat) -> None:
        self.size = size

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = self.size.wide_dims(x.shape[1])
        best = _best(x[:, None, wide:], x[:, None, :wide])
        codes = [as_bytes(best.wide[:, 0].to(torch.int8)), _pack(best.codes[:, 0])]
        return torch.cat(codes, dim=1), as_bytes(best.scales)

    def decode(self, codes: Tensor, scales: Tensor, dim: int) -> Tensor:
        wide = self.size.wide_dims(dim)
        steps = [codes[:, :wide].contiguous().view(torch.int8) * _WIDE_STEP, _unpack(codes[:, wide:])]
        return torch.cat(steps, dim=1)[:, :dim] * _floats(scales)[:, 0]


class _Coded(NamedTuple):
    codes: Tensor
    """[N, groups, n] whole floats -8 .. 7"""
    wide: Tensor
    """[N, groups, w] whole floats -127 .. 127"""
    scales: Tensor
    """[N, groups] float16"""
    error: Tensor
    """[N, groups] squared"""


def _best(parts: Tensor, wide: Tensor) -> _Coded:
    """parts [N, groups, n] and wide [N, groups, w] under one scale."""
    extreme = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))[..., 0]
    least = torch.zeros_like(extreme)
    if wide.shape[-1]:
        least = wide.abs().amax(-1) / (_WIDE_LARGEST * _WIDE_STEP)
    best = _coded(parts, wide, extreme / -8, least)
    for shrink in _SHRINK:
        trial = _coded(parts, wide, extreme * (shrink / -8), least)
        better = trial.error < best.error
        best = _Coded(
            *(
                torch.where(better.view(*better.shape, *[1] * (new.dim() - 2)), new, old)
                for new, old in zip(trial, best, strict=True)
            )
        )
    return best


def _coded(parts: Tensor, wide: Tensor, scale: Tensor, least: Tensor) -> _Coded:
    """With the scale given, or one of its sign and of size `least` [N, groups], which the wide elements need."""
    scales = scale_of(torch.where(scale.abs() < least, torch.where(scale < 0, -least, least), scale))
    divisor = scales.float()[..., None]
    divisor = torch.where(divisor == 0, _SMALLEST, divisor)
    codes = (parts / divisor).round().clamp(-8, 7)
    wide_codes = (wide / (divisor * _WIDE_STEP)).round().clamp(-_WIDE_LARGEST, _WIDE_LARGEST)
    error = torch.cat([codes * divisor - parts, wide_codes * _WIDE_STEP * divisor - wide], dim=-1).square()
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


def _floats(scales: Tensor) -> Tensor:
    """[N, 2 * groups] uint8 -> [N, groups, 1] float32."""
    return scales.contiguous().view(torch.float16).float()[..., None]
