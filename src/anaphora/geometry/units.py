"""Bytes for people: exact, and rounded in power-of-two units."""

from __future__ import annotations


def human_bytes(count: int) -> str:
    """Power-of-two units with two decimals at most: 469762048 -> '448 MiB'."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.2f}".rstrip("0").rstrip(".") + f" {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
