"""The head of a GGUF file, read with every bound checked (format: ggml's docs/gguf.md, versions 2 and 3).

magic "GGUF" | version | tensor count | key count | keys and values | tensor table | padding | tensor data
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from anaphora.errors import CorruptModel, UnsupportedModel

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)

GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""ggml's number of a tensor type -> (name, weights per block, bytes per block)."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table."""

    name: str
    elements: int
    bytes: int
    type: str
    """ggml's name of the type, such as Q4_K."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself."""

    architecture: str
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.tensors)

    @property
    def elements(self) -> int:
        """The weights of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)


def read_gguf_header(path: Path, *, part_of_split: bool = False) -> GgufHeader:
    """Read the head and check that the file holds every byte its tensor table promises.

    `part_of_split`: a part of a split file is what is expected; parts after the first name no architecture ("").
    Raises CorruptModel (not GGUF, cut short, impossible values), UnsupportedModel (a version, a part of a split
    file or a tensor type that cannot be read). Opens the file only for reading.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CorruptModel(f"{path} is not a GGUF file (it does not begin with 'GGUF'). Download it again.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _read(path, data, part_of_split)
            except (struct.error, _OutOfBounds) as error:
                raise CorruptModel(
                    f"{path} ends inside its header ({len(data):,} bytes). Download it again."
                ) from error
            except UnicodeDecodeError as error:
                raise CorruptModel(f"{path} has garbage in its header. Download it again.") from error


class _OutOfBounds(Exception):
    """A length in the header points behind the end of the file."""


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.pos = data, 4

    def take(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        # A garbage count must fail here, not after allocating for it.
        if count * struct.calcsize(f"<{code}") > len(self.data) - self.pos:
            raise _OutOfBounds
        values = struct.unpack_from(layout, self.data, self.pos)
        self.pos += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (length,) = self.take("Q")
        if length > len(self.data) - self.pos:
            raise _OutOfBounds
        self.pos += length
        return self.data[self.pos - length : self.pos].decode("utf-8")


def _read(path: Path, data: mmap.mmap, part_of_split: bool) -> GgufHeader:
    at = _Cursor(data)
    (version,) = at.take("I")
    if version not in _VERSIONS:
        raise UnsupportedModel(
            f"{path} is GGUF version {version}; versions 2 and 3 can be read. "
            "Convert the model again with a current llama.cpp."
        )
    tensor_count, key_count = at.take("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        name = at.string()
        metadata[name] = _value(path, at, at.take("I")[0])
    if not part_of_split and isinstance(parts := metadata.get("split.count", 0), int) and parts > 1:
        raise UnsupportedModel(
            f"{path} is one of {parts} parts of a split model. Join them first: "
            f"llama-gguf-split --merge {path.name} whole.gguf"
        )
    architecture = metadata.get("general.architecture", "" if part_of_split else None)
    if not isinstance(architecture, str) or not (tensor_count or part_of_split):
        raise CorruptModel(f"{path} names no architecture or holds no tensors. Download it again.")
    tensors, end = _tensor_table(path, at, tensor_count)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CorruptModel(f"{path} states an impossible alignment ({alignment!r}). Download it again.")
    promised = -(-at.pos // alignment) * alignment + end
    if promised > len(data):
        raise CorruptModel(
            f"{path} is cut short: its tensors need {promised:,} bytes, the file has {len(data):,}. Download it again."
        )
    return GgufHeader(architecture, metadata, tensors)


def _value(path: Path, at: _Cursor, kind: int) -> Any:
    if kind in _SCALARS:
        return at.take(_SCALARS[kind])[0]
    if kind == _STRING:
        return at.string()
    if kind == _ARRAY:
        item, count = *at.take("I"), *at.take("Q")
        if item in _SCALARS:
            return list(at.take(_SCALARS[item], count))
        if item == _STRING and count <= len(at.data):
            return [at.string() for _ in range(count)]
    raise CorruptModel(f"{path} has a value of unknown type {kind} in its header. Download it again.")


def _tensor_table(path: Path, at: _Cursor, count: int) -> tuple[tuple[GgufTensor, ...], int]:
    """(tensors, end of the last one in bytes from the start of the data)."""
    tensors, end = [], 0
    for _ in range(count):
        name = at.string()
        shape = at.take("Q", at.take("I")[0])
        kind, offset = *at.take("I"), *at.take("Q")
        known = GGML_TYPES.get(kind)
        if known is None:
            raise UnsupportedModel(
                f"{path}: tensor {name} has the unknown type {kind}. Take the model in another quantization."
            )
        type_name, per_block, block_bytes = known
        elements = prod(shape)
        tensors.append(GgufTensor(name, elements, elements // per_block * block_bytes, type_name))
        end = max(end, offset + tensors[-1].bytes)
    return tuple(tensors), end
