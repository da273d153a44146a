"""What is done to keys and values before a format with scales keeps them, and undone around attention.

    keys     k' = (k - mean) B            queries  q' = q B^-T         so q'.k' = q.k - q.mean, and softmax is blind to
    values   v' = v S / rms               output   o = o' S^T rms      what all keys of a query have in common

B gives every channel the size at which its error costs the same, sorts channels by that cost, and spreads them:

    B = P(sorted) diag(sqrt(rms q / rms k)) S       cost of a channel = rms q * rms k

Outliers of keys live in fixed channels (KIVI, arXiv 2402.02750; KVQuant, 2401.18079); folding a static scale of each
channel into the queries is SmoothQuant's idea (2211.10438), taking off the mean SageAttention's (2410.02367), the
spreading by an orthogonal S QuaRot's (2404.00456). Where the format has wide elements, the costly channels are spread
among themselves and all others among themselves: few bits are spent where few channels carry most of the cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from anaphora.storage.calibration import LayerMoments

_FLOOR = 1e-3
"""Least rms of a channel, as a share of the head's mean: a channel that was silent in the built-in text may speak."""


@dataclass(frozen=True, slots=True)
class KeyTransform:
    """Of one layer, per KV head."""

    mean: Tensor
    """[kv_heads, dim]"""
    keys: Tensor
    """[kv_heads, dim, dim]: k' = (k - mean) @ keys"""
    queries: Tensor
    """[kv_heads, dim, dim]: q' = q @ queries"""

    def of_keys(self, key: Tensor) -> Tensor:
        """key [T, kv_heads, dim] of any dtype -> float32."""
        return torch.einsum("thd,hde->the", key.float() - self.mean, self.keys)

    def of_queries(self, query: Tensor) -> Tensor:
        """query [T, query_heads, dim] of any dtype -> float32; query head h reads KV head h // (heads per KV head)."""
        grouped = query.float().unflatten(1, (len(self.mean), -1))  # type: ignore[no-untyped-call]
        turned: Tensor = torch.einsum("thgd,hde->thge", grouped, self.queries).flatten(1, 2)
        return turned


@dataclass(frozen=True, slots=True)
class ValueTransform:
    """Of one layer."""

    rms: Tensor
    """[kv_heads, 1]"""
    spread: Tensor
    """[dim, dim], orthogonal"""

    def of_values(self, value: Tensor) -> Tensor:
        """value [T, kv_heads, dim] of any dtype -> float32, of size about 1."""
        return (value.float() / self.rms) @ self.spread

    def of_output(self, output: Tensor) -> Tensor:
        """What attention made of transformed values, [T, query_heads, dim] -> of the values themselves."""
        return output @ self.spread.T * self.rms.repeat_interleave(output.shape[1] // len(self.rms), dim=0)


def key_transform(moments: LayerMoments, wide: int) -> KeyTransform:
    """`wide`: how many channels the format keeps with more bits."""
    query, key = _floored(moments.query_rms), _floored(moments.key_rms)
    heads, dim = key.shape
    cost, order = (query * key).sort(dim=-1, descending=True, stable=True)
    sizes = (query / key).sqrt().gather(-1, order)
    spreads = torch.zeros(heads, dim, dim, dtype=torch.float64)
    for part in (slice(0, wide), slice(wide, dim)):
        if part.start < part.stop:  # every element of the result has an rms of about 1
            spreads[:, part, part] = spread(part.stop - part.start) / cost[:, part].mean(-1).sqrt()[:, None, None]
    matrix = torch.zeros_like(spreads).scatter_(1, order[..., None].expand_as(spreads), sizes[..., None] * spreads)
    return KeyTransform(moments.key_mean, matrix.float(), torch.linalg.inv(matrix).mT.float())


def value_transform(moments: LayerMoments) -> ValueTransform:
    sizes = moments.value_rms[:, :1]
    return ValueTransform(torch.where(sizes > 0, sizes, 1.0), spread(moments.value_rms.shape[-1]).float())


def spread(n: int) -> Tensor:
    """An orthogonal [n, n] float64, elements of about one size: Hadamard, times cosines for the odd part of n."""
    odd = n // (two := n & -n)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < two:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    steps = torch.arange(odd, dtype=torch.float64)
    cosines = torch.cos(math.pi * (steps + 0.5) * steps[:, None] / odd) * math.sqrt(2 / odd)
    cosines[0] /= math.sqrt(2)
    return torch.kron(hadamard / math.sqrt(two), cosines)


def _floored(rms: Tensor) -> Tensor:
    wide = rms.double()
    return torch.maximum(wide, wide.mean(-1, keepdim=True) * _FLOOR).clamp_min(torch.finfo(torch.float32).tiny)
