from __future__ import annotations

import resource

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anaphora.errors import ConfigError
from anaphora.geometry.layout import CacheGroup, CacheLayout
from anaphora.storage.paged import PagedStorage
from anaphora.types import BlockCopy, BlockId

CPU = torch.device("cpu")
LAYOUT = CacheLayout(
    (CacheGroup(None, (0, 2)), CacheGroup(8, (1, 3))), slots=2, kv_heads=3, key_dim=5, value_dim=7, block_size=4
)


def test_shapes_and_bytes() -> None:
    storage = PagedStorage(LAYOUT, 6, torch.bfloat16, CPU)
    assert storage.keys.shape == (6, 2, 3, 4, 5)
    assert storage.values.shape == (6, 2, 3, 4, 7)
    assert storage.keys.dtype == storage.values.dtype == torch.bfloat16
    assert storage.keys.is_contiguous()
    assert storage.values.is_contiguous()
    assert storage.block_bytes == 2 * 3 * (5 + 7) * 4 * 2 == LAYOUT.block_bytes(2)
    assert storage.nbytes == storage.keys.nbytes + storage.values.nbytes == 6 * storage.block_bytes
    assert storage.keys.data_ptr() % 64 == storage.values.data_ptr() % 64 == 0
    assert not storage.keys.any()
    assert not storage.values.any()


def test_layers_of_two_groups_share_a_slot() -> None:
    storage = PagedStorage(LAYOUT, 6, torch.float32, CPU)
    keys, values = storage.layer(3)
    keys[2] = 1.0
    values[2] = 2.0
    assert keys.shape == (6, 3, 4, 5)
    assert values.shape == (6, 3, 4, 7)
    assert bool((storage.keys[2, 1] == 1.0).all())
    assert bool((storage.layer(2)[1][2] == 2.0).all())  # slot 1 of the other group: another request's block table
    assert not storage.layer(0)[0].any()
    with pytest.raises(IndexError):
        storage.layer(4)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 4)), max_size=6, unique_by=lambda copy: copy[1]
    )
)
def test_copies_read_every_source_before_they_write(copies: list[tuple[int, int, int]]) -> None:
    storage = PagedStorage(LAYOUT, 6, torch.float32, CPU)
    for tensor in (storage.keys, storage.values):
        tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape))
    before = storage.keys.clone(), storage.values.clone()
    storage.copy([BlockCopy(BlockId(src), BlockId(dst), count) for src, dst, count in copies])
    for old, new in zip(before, (storage.keys, storage.values), strict=True):
        wanted = old.clone()
        for src, dst, count in copies:
            wanted[dst, :, :, :count] = old[src, :, :, :count]
        assert torch.equal(new, wanted)


def test_memory_is_taken_when_it_is_first_written() -> None:
    before = _resident_bytes()
    storage = PagedStorage(LAYOUT, 400_000, torch.float32, CPU)  # more than 400 MB
    assert storage.nbytes > 400e6
    assert _resident_bytes() - before < 20e6
    storage.keys[:100_000] = 1.0
    assert _resident_bytes() - before > 40e6


def test_too_much_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        PagedStorage(LAYOUT, 1 << 50, torch.float32, CPU)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
