"""The codec of one model's cache: what every layer's keys and values become when they are stored.

    stored = format.encode(transform(keys)); attention runs on transformed queries over what is decoded, and its
    output is transformed back (storage/transform.py)

One codec object is asked by the storage, the attention backends and the tiers; its sizes come from
`geometry/kv_dtype.py`, which planning asks too.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from anaphora.errors import AnaphoraError
from anaphora.geometry.kv_dtype import PLAIN, BlockMap, KVDtype, kv_dtype
from anaphora.geometry.layout import CacheLayout
from anaphora.storage.calibration import Calibration
from anaphora.storage.formats import FORMATS
from anaphora.storage.formats.base import Format
from anaphora.storage.transform import KeyTransform, ValueTransform, key_transform, value_transform

VERSION = 1
"""Of what a block means: raise it when a format, a transform or a place changes, and old blocks match no more."""
_LONGEST_NAME = 32
"""Characters; what the tiers' records have room for."""


@dataclass(frozen=True, slots=True)
class LayerCodec:
    """One layer's formats, and where its pieces lie in a block: head h at offset + h * (key_bytes + value_bytes)."""

    index: int
    key: Format
    value: Format
    offset: int
    """Bytes from the block's begin to head 0's key piece; its value piece follows at once."""
    key_bytes: int
    """Of one key piece."""
    value_bytes: int
    key_transform: KeyTransform | None
    """None where keys are plain."""
    value_transform: ValueTransform | None

    def before(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What attention over stored keys and values asks with, and what is to be stored; float32 where transformed.

        query [T, query_heads, key_dim], key [T, kv_heads, key_dim], value [T, kv_heads, value_dim].

        Raises AnaphoraError, naming the layer, when a format with scales is given NaN or infinity: it would spread.
        """
        if self.key_transform is not None:
            self._check("keys", key)
            query, key = self.key_transform.of_queries(query), self.key_transform.of_keys(key)
        if self.value_transform is not None:
            self._check("values", value)
            value = self.value_transform.of_values(value)
        return query, key, value

    def after(self, output: Tensor) -> Tensor:
        """What attention made of stored values, [T, query_heads, value_dim] -> of the values themselves."""
        return output if self.value_transform is None else self.value_transform.of_output(output)

    def _check(self, what: str, x: Tensor) -> None:
        if not bool(x.isfinite().all()):
            raise not_finite(self.index, what)


def not_finite(layer: int, what: str) -> AnaphoraError:
    """The error that a format with scales was given NaN or infinity; what: keys or values."""
    return AnaphoraError(
        f"layer {layer} made {what} that are NaN or infinite, which the cache's formats with scales cannot hold. "
        "Try --dtype float32, or fetch the weights again"
    )


class Codec:
    """Every layer's codec. Has no state."""

    def __init__(self, dtype: KVDtype, layout: CacheLayout, calibration: Calibration | None = None) -> None:
        """`calibration` None: formats with scales know nothing of the model, and lose more.

        Raises ConfigError when a width of the layout does not suit a format.
        """
        self.dtype = dtype
        self.layout = layout
        self._map = BlockMap(layout, dtype)
        self._calibration = calibration

    @property
    def calibrated(self) -> bool:
        """Whether what is stored depends on a calibration: any format but the plain ones does."""
        return not {self.dtype.key.name, self.dtype.value.name} <= PLAIN

    @cached_property
    def name(self) -> str:
        """Full name, at most 32 characters, with a digest of the calibration: part of the blocks' namespace."""
        name = self.dtype.name
        if not self.calibrated and len(name) <= _LONGEST_NAME:
            return name
        whole = f"{name} {self._calibration.digest if self.calibrated and self._calibration else ''}"
        digest = hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()
        return f"{name[: _LONGEST_NAME - len(digest) - 1]}-{digest}"

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
        layout = self.layout
        layers = [layer for group in layout.groups for layer in group.layers]
        known = self._calibration or Calibration.neutral(
            max(layers) + 1, layout.kv_heads, layout.key_dim, layout.value_dim
        )
        return {layer: self._layer(layer, known) for layer in layers}

    def _layer(self, index: int, calibration: Calibration) -> LayerCodec:
        key, value = self.dtype.layer(index)
        moments = calibration.layers[index]
        return LayerCodec(
            index,
            FORMATS[key.name],
            FORMATS[value.name],
            self._map.offset(index),
            *self._map.piece_bytes(index),
            None if key.name in PLAIN else key_transform(moments, key.wide_dims(self.layout.key_dim)),
            None if value.name in PLAIN else value_transform(moments),
        )


def codec_for(name: str, layout: CacheLayout, *, own: str = "bf16", calibration: Calibration | None = None) -> Codec:
    """Raises ConfigError: an unknown name (with the nearest known one), or a width that does not suit it."""
    return Codec(kv_dtype(name, own=own), layout, calibration)
