"""Small programs around one operation, and their float64 references."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

EPS = 2.0**-24
"""Half a unit in the last place of float32, relative."""


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(program: Any, rows: int, positions: np.ndarray | None = None) -> None:
    """One step: token i in row i, no logits."""
    ids = np.arange(rows, dtype=np.int64)
    logits = np.empty((0, 0), np.float32)
    program.run(None, ids, ids if positions is None else positions, np.empty(0, np.int32), logits)


def linear(kernels: ModuleType, x: Tensor, weights: Any, start: Tensor | None = None, **options: Any) -> Tensor:
    """One product of x [rows, inputs]; `start` is what `out` holds before, for add=True."""
    program = kernels.Program()
    source, out = program.buffer(weights.inputs), program.buffer(weights.outputs)
    program.embed(source, kernels.Weights(x))
    if start is not None:
        program.embed(out, kernels.Weights(start))
    program.linear(out, source, weights, **options)
    run(program, len(x))
    return torch.from_numpy(program.values(out))


def logits(kernels: ModuleType, x: Tensor, weights: Any, wanted: list[int], **options: Any) -> Tensor:
    program = kernels.Program()
    source = program.buffer(weights.inputs)
    program.embed(source, kernels.Weights(x))
    program.logits(source, weights, **options)
    ids = np.arange(len(x), dtype=np.int64)
    out = np.full((len(wanted), weights.outputs), np.nan, np.float32)
    program.run(None, ids, ids, np.array(wanted, np.int32), out)
    return torch.from_numpy(out)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float64."""
    wide = x.double()
    normed: Tensor = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return normed


def product_bound(x: Tensor, weight: Tensor, norm: bool = False) -> Tensor:
    """Most that float32 sums of x weight^T may be off: rounding errors add up like a random walk, at 4 sigma."""
    terms = 4.0 * x.shape[-1] ** 0.5 + (8.0 if norm else 4.0)
    bound: Tensor = terms * EPS * (x.double().abs() @ weight.double().abs().T) + 1e-30
    return bound
