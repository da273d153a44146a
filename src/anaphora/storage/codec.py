"""The codec of one model's cache: what every layer's keys and values become when they are stored.

One codec object is asked by the storage, the attention backends and the tiers; its sizes come from
`geometry/kv_dtype.py`, which planning asks too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from anaphora.geometry.kv_dtype import BlockMap, KVDtype, kv_dtype
from anaphora.geometry.layout import CacheLayout
from anaphora.storage.formats import FORMATS
from anaphora.storage.formats.base import Format


@dataclass(frozen=True, slots=True)
class LayerCodec:
    """One layer's formats, and where its pieces lie in a block: head h at offset + h * (key_bytes + value_bytes)."""

    key: Format
    value: Format
    offset: int
    """Bytes from the block's begin to head 0's key piece; its value piece follows at once."""
    key_bytes: int
    """Of one key piece."""
    value_bytes: int


class Codec:
    """Every layer's codec. Has no state."""

    def __init__(self, dtype: KVDtype, layout: CacheLayout) -> None:
        """Raises ConfigError when a width of the layout does not suit a format."""
        self.dtype = dtype
        self.layout = layout
        self._map = BlockMap(layout, dtype)

    @property
    def name(self) -> str:
        """Full name: part of the blocks' namespace."""
        return self.dtype.name

    @property
    def block_bytes(self) -> int:
        return self._map.block_bytes

    @property
    def bytes_per_token(self) -> int:
        """Of all layers together, scales included."""
        return self.dtype.bytes_per_token(self.layout)

    def layer(self, index: int) -> LayerCodec:
        return self._layers[index]

    @cached_property
    def _layers(self) -> dict[int, LayerCodec]:
        return {layer: self._layer(layer) for group in self.layout.groups for layer in group.layers}

    def _layer(self, index: int) -> LayerCodec:
        key, value = (FORMATS[form.name] for form in self.dtype.layer(index))
        return LayerCodec(key, value, self._map.offset(index), *self._map.piece_bytes(index))


def codec_for(name: str, layout: CacheLayout, *, own: str = "bf16") -> Codec:
    """Raises ConfigError: an unknown name (with the nearest known one), or a width that does not suit it."""
    return Codec(kv_dtype(name, own=own), layout)
