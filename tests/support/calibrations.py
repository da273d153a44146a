"""Codecs that know of a model that there is not."""

from __future__ import annotations

import torch

from anaphora.geometry.layout import CacheLayout
from anaphora.storage.calibration import Calibration, LayerMoments
from anaphora.storage.codec import LayerCodec, codec_for
from anaphora.storage.paged import PagedStorage


def random_calibration(layout: CacheLayout, seed: int = 0) -> Calibration:
    random = torch.Generator().manual_seed(seed)

    def sizes(dim: int) -> torch.Tensor:
        return torch.rand(layout.kv_heads, dim, generator=random) * 3 + 0.1

    layers = 1 + max(layer for group in layout.groups for layer in group.layers)
    return Calibration(
        tuple(
            LayerMoments(
                sizes(layout.key_dim),
                torch.randn(layout.kv_heads, layout.key_dim, generator=random),
                sizes(layout.key_dim),
                sizes(1).expand(-1, layout.value_dim).contiguous(),
            )
            for _ in range(layers)
        )
    )


def calibrated_storage(layout: CacheLayout, kv_dtype: str, num_blocks: int) -> tuple[LayerCodec, PagedStorage]:
    """(the codec of layer 1, a storage whose unwritten numbers are NaN)."""
    codec = codec_for(kv_dtype, layout, calibration=random_calibration(layout))
    storage = PagedStorage(codec, num_blocks, torch.device("cpu"))
    storage.data.fill_(0xFF)
    return codec.layer(1), storage
