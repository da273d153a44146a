"""Headers of safetensors files: how many weights and bytes a checkpoint has, without reading one of them.

8 bytes length | JSON {"name": {"dtype", "shape", "data_offsets"}, "__metadata__": ...} | tensor data
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from anaphora.errors import CorruptModel

_LONGEST_HEADER = 100 << 20
"""As the format's own reader allows."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What the headers of a checkpoint add up to."""

    elements: int
    """Stored numbers; packed low-bit weights count as the words they are packed in."""
    bytes: int


def header_length(first: bytes, name: str) -> int:
    """The length the first eight bytes give. Raises CorruptModel."""
    length = int.from_bytes(first[:8], "little")
    if len(first) < 8 or not 2 <= length <= _LONGEST_HEADER:
        raise CorruptModel(
            f"{name} is not a safetensors file (its header would be {length:,} bytes). Download it again."
        )
    return length


def add_up(header: bytes, name: str) -> StoredWeights:
    """Sum the tensors of one header. Raises CorruptModel."""
    try:
        table = json.loads(header)
        rows = [row for key, row in table.items() if key != "__metadata__"]
        elements = sum(prod(row["shape"]) for row in rows)
        size = sum(row["data_offsets"][1] - row["data_offsets"][0] for row in rows)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise CorruptModel(f"{name}: its header is broken ({error}). Download it again.") from None
    return StoredWeights(elements, size)


def total(parts: Iterable[StoredWeights]) -> StoredWeights:
    """The sum over the files of a checkpoint."""
    found = list(parts)
    return StoredWeights(sum(part.elements for part in found), sum(part.bytes for part in found))


def read_folder(folder: Path) -> StoredWeights | None:
    """The headers of a folder's safetensors files; None when it has none. Raises CorruptModel."""
    files = sorted(folder.glob("*.safetensors"))
    return total(_read_file(file) for file in files) if files else None


def _read_file(file: Path) -> StoredWeights:
    with file.open("rb") as stream:
        header = stream.read(header_length(stream.read(8), str(file)))
    return add_up(header, str(file))
