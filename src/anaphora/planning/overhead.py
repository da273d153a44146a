"""What a device's memory holds besides KV: weights, activations, libraries, graphs. Estimates, each with its interval.

The KV part of a plan is exact once the bytes available to it are known; those are what this module estimates.
"""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.errors import UnsupportedModel
from anaphora.geometry.layers import Keeps
from anaphora.geometry.model import ModelGeometry
from anaphora.geometry.units import human_bytes
from anaphora.planning.hardware import Device
from anaphora.planning.protocol import EngineSettings

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes: the likely figure, and an interval that is meant to hold the truth nine times in ten."""

    likely: int
    low: int
    high: int
    source: str

    @classmethod
    def exact(cls, count: int, source: str) -> Estimate:
        """A figure that is known."""
        return cls(count, count, count, source)


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that takes memory."""

    name: str
    bytes: Estimate
    inside: bool = True
    """Whether it comes out of the engine's share; else it is taken beside it (vLLM's graphs before 0.21)."""


@dataclass(frozen=True, slots=True)
class Budget:
    """One device's memory."""

    device_bytes: int
    allowed_bytes: int
    """What the engine takes of it, KV included."""
    allowed_rule: str
    parts: tuple[Part, ...]
    spread: float = 0.0
    """Part of the device's memory by which it may differ from what is assumed."""

    @property
    def available(self) -> Estimate:
        """Left for KV; negative where the rest alone does not fit. The spreads are independent: they add as squares."""
        inside = [part.bytes for part in self.parts if part.inside]
        likely = self.allowed_bytes - sum(item.likely for item in inside)
        device = (self.allowed_bytes * self.spread) ** 2
        down = (device + sum((item.high - item.likely) ** 2 for item in inside)) ** 0.5
        up = (device + sum((item.likely - item.low) ** 2 for item in inside)) ** 0.5
        return Estimate(likely, int(likely - down), int(likely + up), self.allowed_rule)

    @property
    def beside(self) -> int:
        """Bytes likely taken outside the engine's share."""
        return sum(part.bytes.likely for part in self.parts if not part.inside)

    def part(self, name: str) -> Estimate:
        """A part by name. Raises KeyError."""
        return next(part.bytes for part in self.parts if part.name == name)


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything an engine's budget depends on."""

    geometry: ModelGeometry
    device: Device
    settings: EngineSettings
    devices: int = 1
    utilization: float | None = None
    """The engine's share of the memory; None: its default."""
    quantization: str | None = None
    """Scheme of the weights; None: the checkpoint's own."""
    version: tuple[int, int] | None = None
    """Of the engine; None: the newest known."""
    eager: bool = False
    """No CUDA graphs."""
    free_bytes: int | None = None
    """What is free at start where that is known; None: the device is empty."""

    @property
    def memory_bytes(self) -> int:
        """Of one device."""
        return self.device.memory_bytes or 0

    @property
    def ranks(self) -> int:
        return self.settings.tensor_parallel_size * self.settings.pipeline_parallel_size


_SPREAD = 0.012
"""Of weights over several devices: what is repeated, and vocabularies padded to a multiple of the ranks."""
_EXTRA = 64 * MIB
"""Rotary tables, buffers and the allocator's rounding: loaded weights exceed the tensors by 0.01-0.1 GiB in 20 public
start-up logs of unquantised models."""
_PACKING = 0.04
"""Quantised matrices may be repacked for their kernels, and some stay wide: 0-4% more in 8 logs."""
_MXFP4_ROW = 256
"""Kernels for MXFP4 experts pad rows to this: gpt-oss (2,880) takes 5-6% more than its file, as two logs show."""
_MEASURED, _DERIVED = 0.005, 0.025
"""Drivers, ECC and displays move a device's memory by this part; where nobody published a measurement, by more."""


def device_spread(device: Device) -> float:
    """The part of its memory by which a device may differ from the catalogue."""
    return _MEASURED if device.memory_measured else _DERIVED


def weight_estimate(situation: Situation) -> Estimate:
    """Weights on one rank. Norms and small tensors are repeated on every rank, vocabularies padded.

    Raises UnsupportedModel where the config has too little to count.
    """
    geometry = situation.geometry
    total = geometry.weight_bytes(situation.quantization)
    if total is None:
        raise UnsupportedModel(
            f"{geometry.architecture}: its config has too little to count the weights. Give the folder with its "
            "safetensors, or a GGUF file"
        )
    per_rank = (total + _mxfp4_padding(situation)) // situation.ranks
    narrow = is_quantized(situation)
    spread = per_rank * (_PACKING if narrow else _SPREAD * (situation.ranks > 1)) + _EXTRA
    source = f"{human_bytes(total)} of tensors"
    if situation.ranks > 1:
        source += f" over {situation.ranks} devices"
    low = per_rank * (0.985 if narrow else 0.998)
    return Estimate(per_rank + _EXTRA // 2, int(low), int(per_rank + _EXTRA // 2 + spread), source)


def _mxfp4_padding(situation: Situation) -> int:
    """Bytes that rows of MXFP4 experts are padded by."""
    geometry, own = situation.geometry, situation.geometry.quantization
    name = situation.quantization or (own.name if own else "")
    if name != "mxfp4" or geometry.parameters is None:
        return 0
    rest = -geometry.hidden_size % _MXFP4_ROW
    return int(geometry.parameters.experts * 4.25 / 8 * rest / geometry.hidden_size)


def is_quantized(situation: Situation) -> bool:
    """Whether some matrices are stored in less than 16 bits."""
    own = situation.geometry.quantization
    if situation.quantization is not None:
        return situation.quantization not in ("float32", "bfloat16", "float16")
    return own is not None and min(own.attention, own.dense, own.experts) < 16


def activation_per_token(geometry: ModelGeometry, tp: int, dtype_bytes: int) -> int:
    """Bytes a token takes at the widest point of a forward pass, on one rank.

    Dense: input, output and residual (3 x hidden) beside gate, up and their product (3 x intermediate). It is
    110,592 bytes for Llama-3.1-8B, where two public start-up logs measured 2.07 GiB at 20,000 tokens and
    2.99 GiB at 29,000 (110.9 and 110.7 thousand bytes a token). Experts: the two buffers of the fused kernel.
    """
    hidden = geometry.hidden_size
    return dtype_bytes * (3 * hidden + max(_widest(geometry) // tp, _attention_width(geometry) // tp))


def _widest(geometry: ModelGeometry) -> int:
    """Numbers beside the residual stream: of a dense feed-forward part, or of a token's experts."""
    parameters = geometry.parameters
    if parameters is None:
        return 8 * geometry.hidden_size
    layers = max(1, len(geometry.layers))
    hidden = geometry.hidden_size
    if parameters.experts:
        # one layer's active experts hold 3 x hidden x width x k weights
        per_layer = parameters.active_experts / layers / hidden
        return int(per_layer + max(geometry.hidden_size * 2, per_layer / 3))
    return int(parameters.dense / layers / hidden)


def _attention_width(geometry: ModelGeometry) -> int:
    """Queries, keys and values, and the output."""
    widths = [layer.key_dim for layer in geometry.layers if layer.kv_heads]
    if not widths:
        return 4 * geometry.hidden_size
    heads = geometry.query_heads
    kv_heads = max(layer.kv_heads for layer in geometry.layers)
    return (2 * heads + 2 * kv_heads) * max(widths)


def has_latent(geometry: ModelGeometry) -> bool:
    """Whether attention keeps latents (MLA)."""
    return any(layer.keeps is Keeps.LATENT for layer in geometry.layers)
