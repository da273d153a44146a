"""`anaphora info`: what this installation is and what it runs on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from anaphora import __version__, native

_PACKAGES = ("torch", "transformers")
_CPU_FACTS = Path("/proc/cpuinfo")
_NOTABLE = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(as_json: bool) -> None:
    """Show the versions, the native kernels and the processor they run on."""
    from anaphora.cli.tables import print_object

    facts = _facts()
    if as_json:
        print_object(facts)
        return
    kernels, cpu = facts["native"], facts["cpu"]
    if kernels["available"]:
        others = [name for name in kernels["targets"] if name != kernels["target"]]
        described = f"{kernels['target']} on {kernels['threads']} threads (also: {', '.join(others) or 'none'})"
    else:
        described = kernels["reason"]
    lines = {"anaphora": facts["version"], "python": facts["python"], "native kernels": described}
    lines |= {name: found or "not installed" for name, found in facts["packages"].items()}
    lines["processor"] = f"{cpu['model']}, {cpu['usable_cores']} usable cores"
    lines["instructions"] = ", ".join(cpu["instructions"]) or "none of note"
    for name, value in lines.items():
        click.echo(f"{name:15} {value}")


def _facts() -> dict[str, Any]:
    kernels = native.load()
    return {
        "version": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "native": {
            "available": kernels is not None,
            "reason": native.missing(),
            "target": None if kernels is None else kernels.target(),
            "targets": [] if kernels is None else kernels.targets(),
            "threads": None if kernels is None else kernels.threads(),
        },
        "cpu": _cpu(),
    }


def _version(package: str) -> str | None:
    """Read from its metadata: importing torch takes seconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    try:
        lines = _CPU_FACTS.read_text().split("\n\n", 1)[0].splitlines()
    except OSError:  # not Linux
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = facts.get("flags", "").split()
    return {
        "model": facts.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "usable_cores": native.usable_cores(),
        "instructions": [name for name in _NOTABLE if name in flags],
    }
