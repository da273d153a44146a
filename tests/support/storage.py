"""Storages and runners for tests."""

from __future__ import annotations

import pytest
import torch

from anaphora import native
from anaphora.engine.attention import TorchAttention
from anaphora.engine.models.load import LoadedModel, native_module
from anaphora.engine.models.protocol import Decoder
from anaphora.engine.native_attention import NativeAttention, NativeStorage
from anaphora.engine.runner import LayerwiseExecutor, ModelRunner
from anaphora.geometry.layout import CacheLayout
from anaphora.storage.codec import codec_for
from anaphora.storage.paged import PagedStorage

needs_native = pytest.mark.skipif(native.missing() is not None, reason="the native kernels were not built")
BACKENDS = ("torch", pytest.param("native", marks=needs_native))


def make_storage(layout: CacheLayout, num_blocks: int, kv_dtype: str = "fp32", *, nan: bool = False) -> PagedStorage:
    """On the CPU; `nan`: every number that is not written is NaN."""
    storage = PagedStorage(codec_for(kv_dtype, layout), num_blocks, torch.device("cpu"))
    if nan:
        storage.data.fill_(0xFF)
    return storage


def runner_of(loaded: LoadedModel, storage: PagedStorage) -> ModelRunner:
    return ModelRunner(loaded.executor(storage), storage)


def native_runner(decoder: Decoder, storage: PagedStorage) -> ModelRunner:
    """Layer by layer, with the native attention."""
    return ModelRunner(LayerwiseExecutor(decoder, NativeAttention(NativeStorage(native_module(), storage))), storage)


def torch_runner(decoder: Decoder, storage: PagedStorage) -> ModelRunner:
    return ModelRunner(LayerwiseExecutor(decoder, TorchAttention(storage)), storage)
