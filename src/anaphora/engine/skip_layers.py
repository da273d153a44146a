"""`--kv-cache-dtype-skip-layers`: the layers that keep the model's own dtype."""

from __future__ import annotations

import re

from anaphora.errors import ConfigError

_ONE = re.compile(r"(-?\d+)(?:-(-?\d+))?")


def parse_layers(text: str, num_layers: int) -> frozenset[int]:
    """'0,1,-1', '0-3', '28--1' -> numbers from 0; negative ones count from the end.

    Raises ConfigError, with the layers that there are.
    """
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _ONE.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"--kv-cache-dtype-skip-layers {text!r}: {part!r} is no layer; write for example 0,1,-1 or 0-3"
            )
        first = _layer(int(match[1]), num_layers)
        last = first if match[2] is None else _layer(int(match[2]), num_layers)
        if last < first:
            raise ConfigError(f"--kv-cache-dtype-skip-layers: {part} ends before it begins; give the smaller first")
        found.update(range(first, last + 1))
    return frozenset(found)


def _layer(number: int, num_layers: int) -> int:
    if not -num_layers <= number < num_layers:
        raise ConfigError(
            f"--kv-cache-dtype-skip-layers names layer {number}; this model has 0 to {num_layers - 1} "
            f"(or -{num_layers} to -1, counted from the end)"
        )
    return number % num_layers
