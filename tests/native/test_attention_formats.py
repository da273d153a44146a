"""Formats with scales in the native kernels: bytes, transforms, and what cannot be kept."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from anaphora.engine.native_attention import kv_storage
from support.attention_cases import APART, LAYER, SCALED, Rules, Sequences, Shape
from support.calibrations import calibrated_storage

DIMS = [(64, 64, 16), (16, 48, 32), (80, 112, 64), (128, 256, 256), (1024, 1024, 16)]


def written_by_torch(like: Sequences) -> Tensor:
    """The bytes that storage/formats makes of the first sequence's keys and values."""
    plain = Sequences(like.kernels, like.shape, [len(like.keys[0])])
    size, count = like.shape.block_size, len(like.keys[0])
    blocks = torch.tensor(like.tables[0]).repeat_interleave(size)[:count]
    plain.storage.write(LAYER, blocks, torch.arange(count) % size, like.keys[0], like.values[0])
    return plain.storage.data


@pytest.mark.parametrize("kv_dtype", SCALED + APART)
@pytest.mark.parametrize(("key_dim", "value_dim", "block_size"), DIMS)
def test_every_size_of_number(
    kernels: ModuleType, target: str, kv_dtype: str, key_dim: int, value_dim: int, block_size: int
) -> None:
    sequences = Sequences(kernels, Shape(2, 1, key_dim, value_dim, block_size, kv_dtype), [300])
    random = torch.Generator().manual_seed(3)
    for x in (sequences.keys[0], sequences.values[0]):
        x *= 2.0 ** torch.randint(-40, 40, (300, 2, 1), generator=random)
        x[::3] *= 2.0 ** torch.randint(-9, 9, x[::3].shape, generator=random)
        x[1::7, :, 3] *= 1e4  # one huge channel
        x[5], x[6], x[7] = 0.0, -0.0, 1e-40
        x[8, :, ::2] = 0.0
        x[9] = torch.tensor([1.0, -1.0]).repeat(x.shape[2] // 2)
        x[10] = torch.tensor([-3.5, 3.5]).repeat(x.shape[2] // 2)
        x[11] = torch.arange(x.shape[2]) / 2  # halves between two codes
        x[12], x[13] = 3e38, -1e-7
    sequences.write([(0, 0, 300)])
    assert torch.equal(sequences.storage.data, written_by_torch(sequences))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(SCALED),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32),
)
def test_any_number(kernels: ModuleType, target: str, kv_dtype: str, numbers: list[float]) -> None:
    sequences = Sequences(kernels, Shape(1, 1, 32, 32, 16, kv_dtype), [1])
    sequences.keys[0][:] = sequences.values[0][:] = torch.tensor(numbers)
    sequences.write([(0, 0, 1)])
    assert torch.equal(sequences.storage.data, written_by_torch(sequences))


@pytest.mark.parametrize("kv_dtype", [*SCALED, "bf16"])
@pytest.mark.parametrize(("number", "key_not_value"), [(torch.nan, True), (torch.inf, True), (-torch.inf, False)])
def test_what_is_not_finite_is_told(
    kernels: ModuleType, target: str, kv_dtype: str, number: float, key_not_value: bool
) -> None:
    sequences = Sequences(kernels, Shape(kv_dtype=kv_dtype), [100])
    (sequences.keys if key_not_value else sequences.values)[0][77, 2, 5] = number
    step = sequences.write([(0, 0, 100)])
    told = (LAYER, "keys" if key_not_value else "values")
    assert step.not_finite == (None if kv_dtype == "bf16" else told)
    assert sequences.step([(0, 0, 1)]).not_finite is None


@pytest.mark.parametrize("kv_dtype", SCALED)
@pytest.mark.parametrize(("per_head", "key_dim", "value_dim"), [(3, 64, 64), (1, 48, 80), (6, 128, 16)])
def test_transforms_are_those_of_the_codec(
    kernels: ModuleType, target: str, kv_dtype: str, per_head: int, key_dim: int, value_dim: int
) -> None:
    shape = Shape(2, per_head, key_dim, value_dim, 16, kv_dtype)
    sequences = Sequences(kernels, shape, [300])
    plain = Sequences(kernels, shape, [300])
    codec, sequences.storage = calibrated_storage(shape.layout, kv_dtype, sequences.storage.num_blocks)
    sequences.native = kv_storage(kernels, sequences.storage)
    (got,) = sequences.attend([(0, 0, 300)], Rules())
    query, key, value = codec.before(sequences.queries[0], sequences.keys[0], sequences.values[0])
    plain.queries, plain.keys, plain.values = [query], [key], [value]
    (mixed,) = plain.attend([(0, 0, 300)], Rules())
    # A rounding more or less in a key can choose another code: errors of the size of a step, in few places.
    expected = codec.after(mixed)
    error = (got - expected).square().mean() / expected.square().mean()
    assert error < 1e-4
    # Where chunks and company are cut changes nothing.
    for start in range(0, 300, 37):
        (part,) = sequences.attend([(0, start, min(37, 300 - start))], Rules())
        assert torch.equal(part, got[start : start + 37])


def test_what_does_not_fit_is_refused(kernels: ModuleType) -> None:
    data = torch.zeros(1, 1 << 16, dtype=torch.uint8)

    def storage(dim: int, key: str, value: str) -> object:
        return kernels.KVStorage(data, 16, 1, dim, dim, [(0, 0, 4096, 4096, key, value)])

    assert storage(64, "int4_keys", "int4_values")
    for key, value in (("int4_values", "int8"), ("int8", "int4_keys")):
        with pytest.raises(ValueError, match="no native kernels"):
            storage(64, key, value)
    with pytest.raises(ValueError, match="multiples of 16"):
        storage(40, "int8", "bf16")
    with pytest.raises(ValueError, match="another shape"):
        kernels.KVStorage(
            *(data, 16, 1, 64, 64, [(0, 0, 4096, 4096, "int8", "int8")]),
            [(None, (torch.ones(2), torch.eye(64)))],
        )
