"""The catalogue of devices that works offline: memory, bandwidth and dense rates, each with its source.

Memory is what the driver reports, not the number on the box (a 24 GB RTX 4090 has 23.65 GiB). Where nobody
published a measurement it is derived from the nominal size by the loss measured on a sibling; the source
says so. Rates are dense (no sparsity), 16-bit ones with 32-bit accumulation.

More devices, or others in place of ours: `hardware.toml` in $ANAPHORA_CONFIG_DIR, else in ~/.config/anaphora.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anaphora.errors import ConfigError, HardwareNotFound
from anaphora.geometry.catalog_files import Entry, check_keys, nearest, overlay, packaged_entries, user_entries

USER_FILE = "hardware.toml"
KINDS = ("gpu", "unified", "cpu", "tpu")
RATES = ("fp32", "fp16", "bf16", "fp8", "int8", "fp4")
GIB = 2**30

_FOLDER = Path(__file__).with_name("catalog")
_NUMBER = (int, float)
_KEYS: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "name": str,
    "aliases": list,
    "vendor": str,
    "kind": str,
    "memory_gib": _NUMBER,
    "memory_from": str,
    "memory_options_gb": list,
    "bandwidth_gb_s": _NUMBER,
    "tflops": dict,
    "bus": str,
    "source": str,
}
_NOISE = re.compile(
    r"\b(?:nvidia|geforce|tesla|amd|instinct|radeon|intel|apple|google|aws|gpu|graphics|edition|generation|the)\b|\(.*?\)"
)
_SERIES = re.compile(r"^(?:rtx|rx|arc|titan)(?=[a-z]?\d)")
_SIZE = re.compile(r"^(.+?)[\s_-]*(\d+)\s*gi?b$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Device:
    """One device; multi-die cards are listed by the die, as drivers show them."""

    id: str
    name: str
    aliases: tuple[str, ...]
    vendor: str
    kind: str
    """One of KINDS; "unified" shares its memory with the CPU."""
    memory_bytes: int | None
    """What a process can be given; None where it depends on the machine (see memory_options_gb)."""
    memory_measured: bool
    """False: derived from the nominal size."""
    memory_options_gb: tuple[int, ...]
    """Sizes the machine is sold with; empty where the memory is fixed, or where any amount can be fitted."""
    bandwidth: float
    """Bytes per second, as the vendor states it."""
    flops: Mapping[str, float]
    """Rate by number format (RATES), operations per second, dense; empty where the vendor publishes none."""
    bus: str | None
    source: str
    family: str

    @property
    def flops_16(self) -> float | None:
        """The 16-bit rate; fp32's where there is no faster 16-bit arithmetic; None when unknown."""
        return self.flops.get("bf16") or self.flops.get("fp16") or self.flops.get("fp32")

    @property
    def flops_8(self) -> float | None:
        """The faster of fp8 and int8, or None when there is neither."""
        return max((self.flops[key] for key in ("fp8", "int8") if key in self.flops), default=None)

    def with_memory(self, gigabytes: int) -> Device:
        """The device with that much memory fitted. Raises ConfigError where it cannot be."""
        if self.memory_bytes is not None:
            raise ConfigError(
                f"{self.name} has its memory soldered on ({self.memory_bytes / GIB:.2f} GiB); leave it out"
            )
        if gigabytes <= 0 or (self.memory_options_gb and gigabytes not in self.memory_options_gb):
            sizes = ", ".join(map(str, self.memory_options_gb)) or "1 and up"
            raise ConfigError(f"{self.name} does not come with {gigabytes} GB; choose one of {sizes}")
        return replace(self, id=f"{self.id}-{gigabytes}gb", memory_bytes=_usable(self.vendor, gigabytes * GIB))


def devices() -> tuple[Device, ...]:
    """Every device, the user's first. Raises ConfigError (file and line) for a broken user file."""
    return tuple(_device(entry) for entry in _entries())


def gpus_of(vendor: str) -> tuple[Device, ...]:
    """The GPUs of one vendor; entries of others are not parsed. Raises ConfigError for a broken user file."""
    named = f'"{vendor}"'
    found = (_device(entry) for entry in _entries() if named in entry.text)
    return tuple(device for device in found if device.vendor == vendor and device.kind == "gpu")


def find_device(name: str, *, memory_gb: int | None = None) -> Device:
    """A device by a name people or drivers use: "rtx-4090", "RTX 4090", "4090", "NVIDIA A100-SXM4-80GB".

    Machines with a choice of memory need it, as `memory_gb` or as a suffix: "m3-max-64gb", "epyc-genoa-768gb".
    Raises HardwareNotFound with the nearest names or the sizes to choose from, ConfigError for a size that
    does not exist and for a broken user file.
    """
    entries = _entries()
    device = _lookup(entries, name)
    sized = _SIZE.match(name.strip())
    if device is None and sized and memory_gb is None:
        device, memory_gb = _lookup(entries, sized[1]), int(sized[2])
        if device is not None and device.memory_bytes is not None:
            device = None  # "rtx-4090-48gb" is not an RTX 4090
    if device is None:
        every = [alias for entry in entries for alias in entry.names]
        near = nearest(name.strip().replace(" ", "-"), every)
        hint = f"nearest names: {', '.join(near)}. " if near else ""
        raise HardwareNotFound(
            f"the catalogue has no device {name!r}; {hint}"
            f"`anaphora hardware` lists all; add your own in {USER_FILE} (see its help)"
        )
    if memory_gb is not None:
        return device.with_memory(memory_gb)
    if device.memory_bytes is None:
        sizes = device.memory_options_gb
        choice = f"comes with {', '.join(map(str, sizes))} GB" if sizes else "takes any amount of memory"
        raise HardwareNotFound(f"{device.name} {choice}; say how much: {device.id}-{sizes[0] if sizes else 64}gb")
    return device


def search_devices(text: str) -> tuple[Device, ...]:
    """The devices whose names, vendor or family hold every word of `text`; all for an empty text."""
    words = text.casefold().split()
    found = []
    for device in devices():
        place = " ".join(
            (device.id, device.name, *device.aliases, device.vendor, device.family, device.kind)
        ).casefold()
        if all(word in place for word in words):
            found.append(device)
    return tuple(found)


def _lookup(entries: tuple[Entry, ...], name: str) -> Device | None:
    wanted = _squash(name)
    bare = _SERIES.sub("", wanted)
    loose: list[Entry] = []
    for entry in entries:
        keys = [_squash(alias) for alias in entry.names]
        if wanted in keys:
            return _device(entry)
        if bare and bare in (_SERIES.sub("", key) for key in keys):
            loose.append(entry)
    if len(loose) == 1:
        return _device(loose[0])
    shown = [device for device in map(_device, entries) if _squash(device.name) == wanted]
    return shown[0] if len(shown) == 1 else None


def _squash(name: str) -> str:
    """A name without case, punctuation, and the words that vendors put around it."""
    return re.sub(r"[^a-z0-9]", "", _NOISE.sub(" ", name.casefold()))


def _entries() -> tuple[Entry, ...]:
    return overlay(packaged_entries(_FOLDER, "device"), user_entries(USER_FILE, "device"))


def _usable(vendor: str, size: int) -> int:
    """What the GPU of a machine with unified memory may take: on Apple's, Metal's recommendedMaxWorkingSetSize."""
    if vendor != "Apple":
        return size
    return size * 3 // 4 if size >= 36 * GIB else size * 2 // 3


def _device(entry: Entry) -> Device:
    table = entry.table()
    check_keys(entry, table, _KEYS)
    kind = table.get("kind", "gpu")
    if kind not in KINDS:
        raise entry.fail(f"kind is one of {', '.join(KINDS)}", "kind")
    memory = table.get("memory_gib")
    options: list[Any] = table.get("memory_options_gb", [])
    if memory is None and kind in ("gpu", "tpu"):
        raise entry.fail(f"{entry.names[0]} needs memory_gib, as its driver reports it")
    for key in ("memory_gib", "bandwidth_gb_s"):
        if table.get(key, 1) <= 0:
            raise entry.fail(f"{key} must be above 0", key)
    if "bandwidth_gb_s" not in table:
        raise entry.fail(f"{entry.names[0]} needs bandwidth_gb_s, in 10^9 bytes per second")
    if not all(isinstance(size, int) and size > 0 for size in options):
        raise entry.fail("memory_options_gb is a list of whole numbers above 0", "memory_options_gb")
    if table.get("memory_from", "derived") not in ("measured", "derived"):
        raise entry.fail("memory_from is measured or derived", "memory_from")
    rates = table.get("tflops", {})
    if any(key not in RATES or not isinstance(rate, _NUMBER) or rate <= 0 for key, rate in rates.items()):
        raise entry.fail(f"tflops holds rates above 0 for any of {', '.join(RATES)}", "tflops")
    return Device(
        id=entry.names[0],
        name=table.get("name", entry.names[0]),
        aliases=entry.names[1:],
        vendor=table.get("vendor", "unknown"),
        kind=kind,
        memory_bytes=None if memory is None else int(memory * GIB),
        memory_measured=table.get("memory_from") == "measured",
        memory_options_gb=tuple(options),
        bandwidth=table["bandwidth_gb_s"] * 1e9,
        flops={key: rate * 1e12 for key, rate in rates.items()},
        bus=table.get("bus"),
        source=table.get("source", entry.file),
        family=entry.family,
    )
