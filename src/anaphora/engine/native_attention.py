"""The native attention: what a step of kernels needs, and a backend for decoders that run layer by layer."""

from __future__ import annotations

from array import array
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from anaphora.engine.attention import Attend
from anaphora.engine.batch import Batch
from anaphora.storage.codec import LayerCodec, not_finite
from anaphora.storage.paged import PagedStorage

if TYPE_CHECKING:
    from anaphora import _native


def kv_storage(native: ModuleType, storage: PagedStorage) -> _native.KVStorage:
    """Holds the storage's memory, and copies of what its codec turns keys, queries, values and outputs by."""
    layout = storage.layout
    layers, turns = [], []
    for layer in range(sum(len(group.layers) for group in layout.groups)):
        codec = storage.codec.layer(layer)
        form = (codec.offset, codec.key_bytes, codec.value_bytes, codec.key.size.name, codec.value.size.name)
        layers.append((layout.place(layer)[0], *form))
        turns.append(_turns(codec))
    shape = (layout.block_size, layout.kv_heads, layout.key_dim, layout.value_dim)
    made: _native.KVStorage = native.KVStorage(storage.data, *shape, layers, turns)
    return made


class NativeStorage:
    """A storage on the CPU as the kernels see it."""

    def __init__(self, native: ModuleType, storage: PagedStorage) -> None:
        self.layout = storage.layout
        self._native = native
        self._storage = kv_storage(native, storage)
        self._windows = [group.window or 0 for group in storage.layout.groups]

    def step(self, batch: Batch) -> _native.Step:
        """What all layers of the batch share. Steps of one storage run one at a time."""
        rows = batch.rows
        tables = [_array(row.block_tables[group]) for group in range(len(self._windows)) for row in rows]
        step: _native.Step = self._native.Step(
            self._storage,
            np.array([row.start for row in rows], np.int32),
            np.array([len(row.token_ids) for row in rows], np.int32),
            np.frombuffer(b"".join(tables), np.int32),
            np.fromiter(accumulate(map(len, tables), initial=0), np.int64, len(tables) + 1),
            self._windows,
        )
        return step


def check(step: _native.Step) -> None:
    """Raises AnaphoraError, naming the layer, when the step was to keep NaN or infinity in a format with scales."""
    if step.not_finite is not None:
        raise not_finite(*step.not_finite)


def _turns(codec: LayerCodec) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
    """(of keys and queries, of values and outputs) as KVStorage takes them."""
    key, value = codec.key_transform, codec.value_transform
    return (
        None if key is None else tuple(x.contiguous() for x in (key.mean, key.keys, key.queries)),
        None if value is None else (value.rms[:, 0].contiguous(), value.spread.contiguous()),
    )


def _array(table: object) -> array[int]:
    return table if isinstance(table, array) else array("i", table)  # type: ignore[call-overload]


class NativeAttention:
    """See AttentionBackend; computes in float32, whatever the dtype of what it is given."""

    def __init__(self, storage: NativeStorage) -> None:
        self._storage = storage

    def begin(self, batch: Batch) -> Attend:
        return _LayerwiseStep(self._storage.step(batch))


class _LayerwiseStep:
    """One batch's `attend`."""

    def __init__(self, step: _native.Step) -> None:
        self._step = step

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self._step.write_kv(layer, _by_token(key), _by_token(value))
        check(self._step)
        out = torch.empty((*query.shape[:2], value.shape[-1]), dtype=torch.float32)
        self._step.attend(
            layer,
            _by_token(query),
            out,
            scale,
            softcap or 0.0,
            None if alibi_slopes is None else alibi_slopes.float().contiguous(),
            None if sinks is None else sinks.float().contiguous(),
        )
        return out.to(query.dtype)


def _by_token(x: Tensor) -> Tensor:
    """[T, heads, dim] float32 whose heads lie side by side; a copy only where they do not."""
    x = x.float()
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
