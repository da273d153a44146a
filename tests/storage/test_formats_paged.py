"""Formats inside the paged storage: chunks and copies change no bit, whatever the format."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anaphora.geometry.kv_dtype import NAMES, kv_dtype
from anaphora.geometry.layout import CacheGroup, CacheLayout
from anaphora.storage.codec import Codec, codec_for
from anaphora.storage.paged import PagedStorage
from anaphora.types import BlockCopy, BlockId

CPU = torch.device("cpu")
LAYOUT = CacheLayout((CacheGroup(None, (0, 1)),), slots=2, kv_heads=2, key_dim=32, value_dim=48, block_size=16)
TOKENS = 40


def filled(codec: Codec, cuts: list[int], seed: int) -> PagedStorage:
    """40 tokens in blocks 0, 1, 2, written in chunks that end at `cuts`."""
    storage = PagedStorage(codec, 5, CPU)
    random = torch.Generator().manual_seed(seed)
    ends = sorted({*cuts, TOKENS})
    for layer in range(2):
        keys, values = (torch.randn(TOKENS, 2, dim, generator=random) * 3 for dim in (32, 48))
        begin = 0
        for end in ends:
            positions = torch.arange(begin, end)
            storage.write(layer, positions // 16, positions % 16, keys[begin:end], values[begin:end])
            begin = end
    return storage


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(NAMES), st.lists(st.integers(1, TOKENS - 1), max_size=6), st.integers(0, 100))
def test_chunks_change_no_bit(name: str, cuts: list[int], seed: int) -> None:
    codec = codec_for(name, LAYOUT)
    assert torch.equal(filled(codec, cuts, seed).data, filled(codec, [], seed).data)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_tokens_of_a_copied_block_read_as_they_were(name: str) -> None:
    storage = filled(codec_for(name, LAYOUT), [], 1)
    before = storage.read(1, torch.tensor([1]))
    storage.copy([BlockCopy(BlockId(1), BlockId(4), 7)])
    positions = torch.arange(7, 16)
    storage.write(1, torch.full((9,), 4), positions, torch.randn(9, 2, 32), torch.randn(9, 2, 48))
    after: tuple[Tensor, Tensor] = storage.read(1, torch.tensor([4]))
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[:, :7], new[:, :7])
        assert not torch.equal(old[:, 7:], new[:, 7:])


def test_a_skipped_layer_keeps_what_bfloat16_keeps() -> None:
    codec = Codec(kv_dtype("int4", skip_layers=[1]), LAYOUT)
    storage, plain = filled(codec, [], 2), filled(codec_for("bf16", LAYOUT), [], 2)
    blocks = torch.tensor([0, 1])
    for kept, wanted in zip(storage.read(1, blocks), plain.read(1, blocks), strict=True):
        assert torch.equal(kept, wanted)
    for kept, wanted in zip(storage.read(0, blocks), plain.read(0, blocks), strict=True):
        assert not torch.equal(kept, wanted)
