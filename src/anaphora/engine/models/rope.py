"""Rotary positions: the `rope_parameters` of a config.json -> frequencies.

Every scaling becomes a tuple of inverse frequencies, so a decoder knows of none. The arithmetic is float32 in
the order transformers does it, so that both make the same numbers. Sources: RoPE (arXiv 2104.09864), linear
position interpolation (2306.15595), dynamic NTK, YaRN (2309.00071), LongRoPE (2402.13753), Llama 3.1.

Dynamic NTK and LongRoPE choose frequencies by the length of a sequence. Keys that are cached and shared must not
depend on what came later, so here the longest sequence the engine takes (`max_model_len`) decides for all, as in
vLLM. Up to the model's original context the numbers are those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The first 2 * len(inverse_frequencies) elements of a head turn; cos and sin are multiplied by `magnitude`."""

    inverse_frequencies: tuple[float, ...]
    magnitude: float

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [T] -> two of [T, 1, rotary / 2], computed in float32."""
        frequencies = torch.tensor(self.inverse_frequencies, dtype=torch.float32, device=positions.device)
        angles = positions[:, None, None].float() * frequencies
        return (angles.cos() * self.magnitude).to(dtype), (angles.sin() * self.magnitude).to(dtype)


@dataclass(frozen=True, slots=True)
class _Context:
    parameters: Mapping[str, Any]
    theta: float
    dim: int
    max_position: int
    original_max_position: int
    longest: int

    def number(self, name: str, default: float | None = None) -> float:
        value = self.parameters.get(name)
        if value is None:
            if default is None:
                raise KeyError(name)
            return default
        return float(value)

    def plain(self) -> Tensor:
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        inverse: Tensor = 1.0 / (self.theta**exponents)
        return inverse


def _default(c: _Context) -> tuple[Tensor, float]:
    return c.plain(), 1.0


def _linear(c: _Context) -> tuple[Tensor, float]:
    return c.plain() / c.number("factor"), 1.0


def _dynamic(c: _Context) -> tuple[Tensor, float]:
    factor = c.number("factor")
    length = max(c.longest, c.max_position)
    stretch = (factor * length / c.max_position) - (factor - 1)
    theta = c.theta * stretch ** (c.dim / (c.dim - 2))
    return _Context(c.parameters, theta, c.dim, c.max_position, c.original_max_position, c.longest).plain(), 1.0


def _llama3(c: _Context) -> tuple[Tensor, float]:
    inverse = c.plain()
    factor, low, high = c.number("factor"), c.number("low_freq_factor"), c.number("high_freq_factor")
    wavelength = 2 * math.pi / inverse
    long = wavelength > c.original_max_position / low
    short = wavelength < c.original_max_position / high
    scaled = torch.where(long, inverse / factor, inverse)
    smooth = (c.original_max_position / wavelength - low) / (high - low)
    between = (1 - smooth) * scaled / factor + smooth * scaled
    return torch.where(~short & ~long, between, scaled), 1.0


def _yarn(c: _Context) -> tuple[Tensor, float]:
    factor = c.number("factor", c.max_position / c.original_max_position)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def turning_point(rotations: float) -> float:
        turns = math.log(c.original_max_position / (rotations * 2 * math.pi))
        return c.dim * turns / (2 * math.log(c.theta))

    low = turning_point(c.number("beta_fast", 0.0) or 32.0)
    high = turning_point(c.number("beta_slow", 0.0) or 1.0)
    if c.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, c.dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(c.dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    powers = c.theta ** (torch.arange(0, c.dim, 2, dtype=torch.float32) / c.dim)
    extrapolated = 1 - ramp
    inverse = 1.0 / (factor * powers) * (1 - extrapolated) + 1.0 / powers * extrapolated

    mscale, mscale_all = c.number("mscale", 0.0), c.number("mscale_all_dim", 0.0)
    own = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
    return inverse, c.number("attention_factor", own)


def _longrope(c: _Context) -> tuple[Tensor, float]:
    factor = c.number("factor", c.max_position / c.original_max_position)
    own = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(c.original_max_position))
    name = "long_factor" if c.longest > c.original_max_position else "short_factor"
    stretch = torch.tensor(c.parameters[name], dtype=torch.float32)
    exponents = torch.arange(0, c.dim, 2, dtype=torch.float32) / c.dim
    return 1.0 / (stretch * c.theta**exponents), c.number("attention_factor", own)


_KINDS: dict[str, Callable[[_Context], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}


def rope_spec(
    parameters: Mapping[str, Any],
    *,
    theta: float,
    dim: int,
    max_position: int,
    original_max_position: int | None,
    max_model_len: int | None,
) -> RopeSpec | None:
    """Frequencies for `dim` rotary elements; None when the kind of scaling is not known here.

    `original_max_position` is the config's own key beside `parameters`, which wins over the one inside.
    Raises KeyError with the parameter's name when one is missing.
    """
    kind = _KINDS.get(str(parameters.get("rope_type") or parameters.get("type") or "default"))
    if kind is None:
        return None
    original = original_max_position or parameters.get("original_max_position_embeddings") or max_position
    context = _Context(parameters, theta, dim, max_position, int(original), max_model_len or max_position)
    inverse, magnitude = kind(context)
    return RopeSpec(tuple(inverse.tolist()), magnitude)
