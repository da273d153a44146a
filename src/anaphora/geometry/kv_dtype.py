"""What a token's keys and values weigh in each stored form: exact bytes, scales included, without torch.

A piece is what one KV head of one layer keeps of one block: of keys, or of values. A `KVDtype` names the format of
every layer's pieces; a `BlockMap` says where the pieces lie in a block:

    block = slot 0 | slot 1 | ...                 a slot is as large as its largest layer (of any group)
    slot  = head 0: key piece, value piece | head 1: key piece, value piece | ...
    piece = codes | scales

`storage/formats` has the codes themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from anaphora.errors import ConfigError
from anaphora.geometry.catalog_files import nearest
from anaphora.geometry.layout import CacheLayout

WHOLE = 1 << 16
"""As a group: all elements of a token share one scale."""


@dataclass(frozen=True, slots=True)
class PieceFormat:
    """Elements lie in units of `unit` in `unit_bytes`; every `group` elements (the last may be fewer) share a scale."""

    name: str
    unit: int
    unit_bytes: int
    group: int = 0
    """0: no scales."""
    group_bytes: int = 2
    wide: int = 0
    """The first of every `wide` elements have a byte each, before the units of the others; 0: none."""
    multiple: int = 1
    """The number of elements must be one of it."""

    def wide_dims(self, dim: int) -> int:
        return dim // self.wide if self.wide else 0

    def code_bytes(self, dim: int) -> int:
        """Of one token; the last unit is padded."""
        wide = self.wide_dims(dim)
        return wide + -(-(dim - wide) // self.unit) * self.unit_bytes

    def groups(self, dim: int) -> int:
        return -(-dim // self.group) if self.group else 0

    def scale_bytes(self, dim: int) -> int:
        """Of one token."""
        return self.groups(dim) * self.group_bytes

    def token_bytes(self, dim: int) -> int:
        return self.code_bytes(dim) + self.scale_bytes(dim)

    def fits(self, dim: int) -> bool:
        """Whether vectors of `dim` elements can be kept so."""
        return dim % self.multiple == 0


_PLAIN = (
    PieceFormat("fp32", unit=1, unit_bytes=4),
    PieceFormat("bf16", unit=2, unit_bytes=4),
    PieceFormat("fp16", unit=2, unit_bytes=4),
)
_BYTES = (
    PieceFormat("fp8_e4m3", unit=1, unit_bytes=1, group=64, multiple=16),
    PieceFormat("int8", unit=1, unit_bytes=1, group=32, multiple=16),
)
PLAIN = frozenset(each.name for each in _PLAIN)
"""Formats that keep every element as it is; the others are calibrated (storage/calibration.py)."""
KEYS = {
    **{each.name: each for each in (*_PLAIN, *_BYTES)},
    "int4": PieceFormat("int4_keys", unit=2, unit_bytes=1, group=WHOLE, wide=8, multiple=16),
}
VALUES = {
    **{each.name: each for each in (*_PLAIN, *_BYTES)},
    "int4": PieceFormat("int4_values", unit=2, unit_bytes=1, group=8, group_bytes=1, multiple=16),
}
_PAIRS = {**{name: (name, name) for name in KEYS}, "k8v4": ("int8", "int4")}
"""(keys, values) of every name."""
_ALIASES = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp8": "fp8_e4m3",
}
NAMES = tuple(_PAIRS)


@dataclass(frozen=True)
class KVDtype:
    """The format of every layer's keys and values."""

    name: str
    """As the user may write it again, for example `int8`, `k8v4` or `keys int8, values bf16, layers 0 and 29 bf16`."""
    key: PieceFormat
    value: PieceFormat
    plain: PieceFormat
    """Of the layers in `skipped`."""
    skipped: frozenset[int] = frozenset()

    def layer(self, index: int) -> tuple[PieceFormat, PieceFormat]:
        """(keys, values) of a layer."""
        return (self.plain, self.plain) if index in self.skipped else (self.key, self.value)

    def check(self, layout: CacheLayout) -> None:
        """Raises ConfigError when a width does not suit a format, or a skipped layer is not there."""
        layers = [layer for group in layout.groups for layer in group.layers]
        if strange := sorted(self.skipped.difference(layers)):
            raise ConfigError(
                f"--kv-cache-dtype-skip-layers names layer {strange[0]}; this model has 0 to {max(layers)}"
            )
        for what, form, dim, every in (
            ("keys", self.key, layout.key_dim, KEYS),
            ("values", self.value, layout.value_dim, VALUES),
        ):
            if not form.fits(dim):
                possible = ", ".join(name for name, each in every.items() if each.fits(dim))
                raise ConfigError(
                    f"{form.name} {what} need a head_dim that is a multiple of {form.multiple}, and this model's is "
                    f"{dim}. Possible here: {possible}"
                )

    def bytes_per_token(self, layout: CacheLayout) -> int:
        """Of all layers together, scales included, empty slots not."""
        return layout.kv_heads * sum(
            key.token_bytes(layout.key_dim) + value.token_bytes(layout.value_dim)
            for group in layout.groups
            for key, value in map(self.layer, group.layers)
        )


@dataclass(frozen=True)
class BlockMap:
    """Where the pieces of every layer lie in a block. Raises ConfigError as KVDtype.check does."""

    layout: CacheLayout
    dtype: KVDtype

    def __post_init__(self) -> None:
        self.dtype.check(self.layout)

    def piece_bytes(self, layer: int) -> tuple[int, int]:
        """(key piece, value piece)."""
        key, value = self.dtype.layer(layer)
        size = self.layout.block_size
        return key.token_bytes(self.layout.key_dim) * size, value.token_bytes(self.layout.value_dim) * size

    def offset(self, layer: int) -> int:
        """Of head 0's key piece; head h lies h * sum(piece_bytes(layer)) further on."""
        return self._offsets[self.layout.place(layer)[1]]

    @property
    def block_bytes(self) -> int:
        return self._offsets[-1]

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """Of every slot, and the end."""
        offsets = [0]
        for slot in range(self.layout.slots):
            layers = (group.layers[slot] for group in self.layout.groups if slot < len(group.layers))
            offsets.append(offsets[-1] + self.layout.kv_heads * max(sum(self.piece_bytes(layer)) for layer in layers))
        return tuple(offsets)


def kv_dtype(
    name: str,
    *,
    own: str = "bf16",
    key: str | None = None,
    value: str | None = None,
    skip_layers: Iterable[int] = (),
) -> KVDtype:
    """`name`: one of NAMES, an alias, or `auto` = `own`, the model's. `key`, `value`: formats that replace its parts.

    Raises ConfigError with the nearest name that is known.
    """
    plain = KEYS[_known(own, "the model's dtype", sorted(PLAIN))]
    whole = plain.name if name == "auto" else _known(name, "--kv-cache-dtype", NAMES)
    parts = _PAIRS[whole]
    keys = _known(key, "--k-dtype", KEYS) if key else parts[0]
    values = _known(value, "--v-dtype", VALUES) if value else parts[1]
    skipped = frozenset(skip_layers)
    if (keys, values) != parts:
        same = (name for name, pair in _PAIRS.items() if pair == (keys, values))
        whole = next(same, f"keys {keys}, values {values}")
    if skipped:
        whole += f", layers {' '.join(map(str, sorted(skipped)))} {plain.name}"
    return KVDtype(whole, KEYS[keys], VALUES[values], plain, skipped)


def _known(name: str, what: str, names: Iterable[str]) -> str:
    every = tuple(names)
    found = _ALIASES.get(name.lower(), name.lower())
    if found in every:
        return found
    near = nearest(name, (*every, *_ALIASES), limit=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"{what} {name!r} is not known; {meant}Known: {', '.join(every)}")
