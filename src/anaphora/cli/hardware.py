"""`anaphora hardware`: the catalogue of devices that works offline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from anaphora.planning.hardware import Device


@click.command()
@click.argument("search", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def hardware(search: tuple[str, ...], as_json: bool) -> None:
    """List the devices that are known, or those that match every word of SEARCH.

    Memory is what the driver reports: measured, or derived from the nominal size (~). Rates are dense. More
    devices: hardware.toml in $ANAPHORA_CONFIG_DIR, else in ~/.config/anaphora.
    """
    from anaphora.cli.tables import print_json, print_table
    from anaphora.planning.hardware import find_device, search_devices

    text = " ".join(search)
    found = search_devices(text)
    if not found:
        found = (find_device(text),)  # or its error, with the nearest names
    if as_json:
        print_json("devices", [_json(device) for device in found])
        return
    columns = ("device", "name", ">memory", ">GB/s", ">16-bit TFLOP/s", ">8-bit", "bus", "also")
    print_table(columns, [_cells(device) for device in found], f"{len(found)} devices; ~ derived, not measured")


def _json(device: Device) -> dict[str, Any]:
    return {
        "id": device.id,
        "name": device.name,
        "aliases": list(device.aliases),
        "vendor": device.vendor,
        "kind": device.kind,
        "memory_bytes": device.memory_bytes,
        "memory_measured": device.memory_measured,
        "memory_options_gb": list(device.memory_options_gb),
        "bandwidth_bytes_per_second": device.bandwidth,
        "flops": dict(device.flops),
        "bus": device.bus,
        "source": device.source,
    }


def _cells(device: Device) -> tuple[str, ...]:
    if device.memory_bytes is not None:
        memory = f"{'' if device.memory_measured else '~'}{device.memory_bytes / 2**30:.2f} GiB"
    elif device.memory_options_gb:
        memory = "/".join(map(str, device.memory_options_gb)) + " GB"
    else:
        memory = "any"
    return (
        device.id,
        device.name,
        memory,
        f"{device.bandwidth / 1e9:,.0f}",
        _tera(device.flops_16),
        _tera(device.flops_8),
        device.bus or "-",
        ", ".join(device.aliases),
    )


def _tera(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e12:,.1f}"
