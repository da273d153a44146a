from __future__ import annotations

import resource

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anaphora.errors import ConfigError
from anaphora.geometry.layout import CacheGroup, CacheLayout
from anaphora.types import BlockCopy, BlockId
from support.storage import make_storage

LAYOUT = CacheLayout(
    (CacheGroup(None, (0, 2)), CacheGroup(8, (1, 3))), slots=2, kv_heads=3, key_dim=5, value_dim=7, block_size=4
)


def test_one_block_is_one_piece_of_memory() -> None:
    storage = make_storage(LAYOUT, 6, "bf16")
    block_bytes = 2 * 3 * (6 + 8) * 4 * 2  # widths of 5 and 7 are padded to pairs
    assert storage.data.shape == (6, block_bytes)
    assert storage.nbytes == storage.data.nbytes == 6 * block_bytes
    assert storage.data.data_ptr() % 64 == 0
    assert not storage.data.any()
    block = storage.block(BlockId(2))
    assert block.is_contiguous()
    assert block.data_ptr() == storage.data.data_ptr() + 2 * block_bytes


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp16"])
def test_what_was_written_is_read(kv_dtype: str) -> None:
    """Tokens written in any order, blocks read in any order; the type's rounding is all that happens."""
    storage = make_storage(LAYOUT, 6, kv_dtype, nan=True)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    keys, values = torch.randn(24, 3, 5), torch.randn(24, 3, 7)
    storage.write(2, order // 4, order % 4, keys[order], values[order])
    blocks = torch.tensor([[5, 0], [3, 3]])
    exact = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kv_dtype]
    for stored, written in zip(storage.read(2, blocks), (keys, values), strict=True):
        assert stored.shape == (2, 3, 8, written.shape[2])
        wanted = written.view(6, 4, 3, -1)[blocks].flatten(1, 2).transpose(1, 2).to(exact).float()
        assert torch.equal(stored, wanted)
    for other in storage.read(0, torch.arange(6)):
        assert bool(other.isnan().all())


def test_the_bytes_lie_as_the_kernels_expect() -> None:
    """Keys: unit by unit, each for all tokens; values: token by token. Heads and slots one behind the other."""
    storage = make_storage(LAYOUT, 2)
    keys, values = torch.randn(4, 3, 5), torch.randn(4, 3, 7)
    storage.write(3, torch.ones(4, dtype=torch.long), torch.arange(4), keys, values)
    slot = storage.block(BlockId(1)).view(torch.float32).view(2, 3, 4 * (5 + 7))[1]
    for head in range(3):
        assert torch.equal(slot[head, :20].view(5, 4), keys[:, head].T)
        assert torch.equal(slot[head, 20:].view(4, 7), values[:, head])


def test_layers_of_two_groups_share_a_slot() -> None:
    storage = make_storage(LAYOUT, 6)
    block, token = torch.tensor([2]), torch.tensor([1])
    storage.write(3, block, token, torch.ones(1, 3, 5), torch.full((1, 3, 7), 2.0))
    keys, values = storage.read(2, block)  # slot 1 of the other group: another request's block table
    assert bool((keys[:, 1] == 1.0).all())
    assert bool((values[:, 1] == 2.0).all())
    assert not storage.read(0, block)[0].any()
    with pytest.raises(KeyError):
        storage.read(4, block)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 4)), max_size=6, unique_by=lambda copy: copy[1]
    )
)
def test_copies_read_every_source_before_they_write(copies: list[tuple[int, int, int]]) -> None:
    storage = make_storage(LAYOUT, 6)
    storage.data.view(torch.float32).copy_(torch.arange(storage.data.numel() // 4).view(6, -1))
    blocks = torch.arange(6)[:, None]
    before = storage.read(1, blocks)
    storage.copy([BlockCopy(BlockId(src), BlockId(dst), count) for src, dst, count in copies])
    for old, new in zip(before, storage.read(1, blocks), strict=True):
        for src, dst, count in copies:
            assert torch.equal(new[dst, :, :count], old[src, :, :count])
        untouched = [block for block in range(6) if block not in {dst for _, dst, _ in copies}]
        assert torch.equal(new[untouched], old[untouched])


def test_memory_is_taken_when_it_is_first_written() -> None:
    before = _resident_bytes()
    storage = make_storage(LAYOUT, 400_000)  # more than 400 MB
    assert storage.nbytes > 400e6
    assert _resident_bytes() - before < 20e6
    storage.data[:100_000] = 1
    assert _resident_bytes() - before > 40e6


def test_too_much_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        make_storage(LAYOUT, 1 << 50)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
