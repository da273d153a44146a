"""A device's compute capability and the name it has in EngineSettings, from what the catalogue knows of it."""

from __future__ import annotations

from anaphora.planning.hardware import Device

_DATACENTER_BLACKWELL = ("b200", "gb200", "b300", "gb300")
_BY_ID = {"gb10": 121, "jetson-thor": 110, "v100": 70, "p100": 60, "a100": 80, "a30": 80, "jetson": 87}


def compute_capability(device: Device) -> int:
    """Times ten, as vLLM compares it; other vendors get 90, which chooses no NVIDIA-only block size."""
    if device.vendor != "NVIDIA":
        return 90
    for prefix, capability in _BY_ID.items():
        if device.id == prefix or device.id.startswith(f"{prefix}-"):
            return capability
    if "fp4" in device.flops:
        return 100 if device.id.startswith(_DATACENTER_BLACKWELL) else 120
    if "fp8" in device.flops:
        return 90 if device.id.startswith(("h", "gh")) else 89
    return 86 if "bf16" in device.flops else 75


def engine_device(device: Device) -> str:
    """ "cpu", or "cuda" for every accelerator: what a size depends on is whether it is a CPU."""
    return "cpu" if device.kind == "cpu" else "cuda"
