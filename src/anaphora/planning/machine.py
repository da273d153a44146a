"""This machine as the catalogue would list it: RAM and cores, and NVIDIA's GPUs when there is a driver.

Needs no package: /proc, os.sysconf, and libnvidia-ml through ctypes.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path

from anaphora.errors import HardwareNotFound
from anaphora.planning.hardware import Device, find_device

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_NAME_BYTES = 96
_MEMORY_V2 = 2 << 24


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan can use here."""

    gpus: tuple[Device, ...]
    gpu_free: tuple[int, ...]
    """Free bytes of each."""
    cpu: Device
    cores: int
    free_bytes: int
    """RAM that a process may still take."""


def this_machine() -> Machine:
    """Look at this machine. Never raises: what cannot be read is left out."""
    total, free = _memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name, flags = _cpu()
    flops = {"bf16": 0.0} if {"avx512bw", "avx512vl", "avx512dq"} <= flags or "bf16" in flags else {}
    cpu = Device(
        id="this-machine",
        name=f"{name}, {cores} cores",
        aliases=(),
        vendor=platform.machine(),
        kind="cpu",
        memory_bytes=total,
        memory_measured=True,
        memory_options_gb=(),
        bandwidth=0.0,
        flops=flops,
        bus=None,
        source="read from this machine",
        family="here",
    )
    found = _nvml()
    return Machine(tuple(gpu for gpu, _ in found), tuple(left for _, left in found), cpu, cores, free)


def _memory() -> tuple[int, int]:
    """(bytes of RAM, bytes a process may still take): less where a cgroup limits it."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = free = os.sysconf("SC_PHYS_PAGES") * page
    meminfo = _read("/proc/meminfo")
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit_file, used_file in _CGROUPS:
        limit, used = _read(limit_file).strip(), _read(used_file).strip()
        if limit.isdigit() and used.isdigit():
            free = min(free, int(limit) - int(used))
            total = min(total, int(limit))
    return total, free


def _cpu() -> tuple[str, set[str]]:
    """(name, feature flags)."""
    text = _read("/proc/cpuinfo")
    keys = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    flags = keys.get("flags") or keys.get("Features") or ""
    return keys.get("model name") or platform.processor() or platform.machine(), set(flags.split())


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


class _MemoryV2(ctypes.Structure):
    """nvmlMemory_v2_t: the reserved part is counted apart, as CUDA counts it."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _nvml() -> list[tuple[Device, int]]:
    """(device, free bytes) of every NVIDIA GPU; empty without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        return [found for index in range(count.value) if (found := _gpu(nvml, index)) is not None]
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, index: int) -> tuple[Device, int] | None:
    handle = ctypes.c_void_p()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    memory = _MemoryV2(version=ctypes.sizeof(_MemoryV2) | _MEMORY_V2)
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return None
    if nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(_NAME_BYTES)) != 0:
        return None
    if nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)) != 0:
        return None
    shown = name.value.decode("utf-8", "replace")
    size = int(memory.total - memory.reserved)
    try:
        known = find_device(shown)
    except HardwareNotFound:
        known = Device(shown, shown, (), "NVIDIA", "gpu", size, True, (), 0.0, {"bf16": 0.0}, None, "NVML", "here")
    return replace(known, memory_bytes=size, memory_measured=True), int(memory.free)
