"""Storages and runners for tests."""

from __future__ import annotations

import torch

from anaphora.engine.attention import TorchAttention
from anaphora.engine.models.protocol import Decoder
from anaphora.engine.runner import LayerwiseExecutor, ModelRunner
from anaphora.geometry.layout import CacheLayout
from anaphora.storage.codec import codec_for
from anaphora.storage.paged import PagedStorage


def make_storage(layout: CacheLayout, num_blocks: int, kv_dtype: str = "fp32", *, nan: bool = False) -> PagedStorage:
    """On the CPU; `nan`: every number that is not written is NaN."""
    storage = PagedStorage(codec_for(kv_dtype, layout), num_blocks, torch.device("cpu"))
    if nan:
        storage.data.fill_(0xFF)
    return storage


def torch_runner(decoder: Decoder, storage: PagedStorage) -> ModelRunner:
    return ModelRunner(LayerwiseExecutor(decoder, TorchAttention(storage)), storage)
