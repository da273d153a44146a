"""Would a tier below the GPU pay? Time to load a prefix's KV against time to compute it again."""

from __future__ import annotations

import re
from dataclasses import dataclass

from anaphora.geometry.model import ModelGeometry
from anaphora.planning.hardware import Device

_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second and lane, as the PCIe generations encode them."""
_C2C = 450e9
_REACHED = 0.8
"""Part of a bus's rate that large pinned copies reach."""
_COMPUTE = 0.5
"""Part of the dense rate that a prefill reaches."""
SSD = 3e9
"""Bytes per second read from an ordinary NVMe drive."""


@dataclass(frozen=True, slots=True)
class Offload:
    """One prefix, from a tier or computed again."""

    tokens: int
    bytes: int
    ram_seconds: float | None
    """None where the device shares its memory with the CPU or the bus is not known."""
    ssd_seconds: float
    recompute_seconds: float | None
    """None where the device's rate is not known."""

    @property
    def pays(self) -> bool | None:
        """Whether loading from RAM is faster than computing; None when that is not known."""
        if self.ram_seconds is None or self.recompute_seconds is None:
            return None
        return self.ram_seconds < self.recompute_seconds


def offload(geometry: ModelGeometry, device: Device, tokens: int, kv_bytes: int, ranks: int = 1) -> Offload:
    """`kv_bytes` on each of `ranks` devices for a prefix of `tokens`."""
    bus = bus_rate(device)
    rate = device.flops_16
    return Offload(
        tokens,
        kv_bytes,
        kv_bytes / (bus * _REACHED) if bus else None,
        kv_bytes * ranks / SSD,
        prefill_flops(geometry, tokens) / (rate * _COMPUTE * ranks) if rate else None,
    )


def bus_rate(device: Device) -> float | None:
    """Bytes per second between the device and the machine's memory; None when there is no bus between them."""
    if device.bus is None or device.kind != "gpu":
        return None
    if "C2C" in device.bus:
        return _C2C
    found = re.match(r"PCIe (\d)\.\d x(\d+)", device.bus)
    return _LANE[int(found[1])] * int(found[2]) if found and int(found[1]) in _LANE else None


def prefill_flops(geometry: ModelGeometry, tokens: int) -> float:
    """Operations of a prefill: 2 a weight and token, and attention's two products over the tokens each query sees."""
    parameters = geometry.parameters
    weights = 0 if parameters is None else parameters.active - parameters.embedding - parameters.vision
    attention = 0.0
    for layer in geometry.layers:
        if layer.kv_heads:
            seen = tokens / 2 if layer.window is None else min(tokens / 2, layer.window)
            attention += 2 * geometry.query_heads * (layer.key_dim + (layer.value_dim or layer.key_dim)) * seen
    return tokens * (2.0 * weights + attention)
