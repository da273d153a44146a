"""Norm and positions of queries and keys, as an attention operation leaves them in its buffer."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from anaphora.engine.models.rope import RopeSpec
from support.native_programs import EPS, numbers, rms_norm

BLOCK = 16


def prepared(
    kernels: ModuleType,
    x: Tensor,
    positions: list[int],
    heads: tuple[int, int, int],
    rope: RopeSpec | None,
    norm: Tensor | None,
    norm_over: str,
) -> Tensor:
    """Queries and keys [T, heads, head_dim] after the operation, every token in a row of the batch of its own."""
    query_heads, kv_heads, dim = heads
    piece = BLOCK * dim * 4
    blocks_per_row = max(positions) // BLOCK + 1
    data = np.zeros((len(positions) * blocks_per_row, kv_heads * 2 * piece), np.uint8)
    storage = kernels.KVStorage(data, BLOCK, kv_heads, dim, dim, [(0, 0, piece, piece, "fp32", "fp32")])
    step = kernels.Step(
        storage,
        np.array(positions, np.int32),
        np.ones(len(positions), np.int32),
        np.arange(len(data), dtype=np.int32),
        np.arange(len(positions) + 1, dtype=np.int64) * blocks_per_row,
        [0],
    )
    program = kernels.Program(*heads)
    qkv, out = program.buffer((query_heads + 2 * kv_heads) * dim), program.buffer(query_heads * dim)
    program.embed(qkv, kernels.Weights(x))
    number = None
    if rope is not None:
        number = program.rope(np.array(rope.inverse_frequencies, np.float32), rope.magnitude)
    program.attention(out, qkv, 0, rope=number, scale=1.0, norm=norm, norm_over=norm_over, norm_eps=1e-6)
    ids = np.arange(len(x), dtype=np.int64)
    program.run(step, ids, np.array(positions, np.int64), np.empty(0, np.int32), np.empty((0, 0), np.float32))
    return torch.from_numpy(program.values(qkv)).view(len(x), -1, dim)[:, : query_heads + kv_heads]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    positions=st.lists(st.integers(0, 4000), min_size=1, max_size=12),
    kv_heads=st.integers(1, 3),
    ratio=st.integers(1, 4),
    dim=st.sampled_from([32, 48, 64, 80, 128]),
    turned=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    norm_over=st.sampled_from([None, "head", "projection"]),
    magnitude=st.sampled_from([1.0, 1.19]),
)
def test_norm_then_turn(
    kernels: ModuleType,
    target: str,
    positions: list[int],
    kv_heads: int,
    ratio: int,
    dim: int,
    turned: float,
    norm_over: str | None,
    magnitude: float,
) -> None:
    heads = (kv_heads * ratio, kv_heads, dim)
    both = heads[0] + heads[1]
    x = numbers(1, len(positions), (both + kv_heads) * dim)
    norm = None if norm_over is None else 1 + numbers(2, both, dim) / 8
    half = int(dim * turned) // 2
    frequencies = 10000.0 ** -(torch.arange(half, dtype=torch.float32) / max(half, 1))
    rope = RopeSpec(tuple(frequencies.tolist()), magnitude) if half else None
    got = prepared(kernels, x, positions, heads, rope, norm, norm_over or "head")

    expected = x.view(len(positions), -1, dim)[:, :both].double()
    if norm is not None and norm_over == "head":
        expected = rms_norm(expected, norm, 1e-6)
    elif norm is not None:
        parts = (slice(heads[0]), slice(heads[0], None))
        normed = [rms_norm(expected[:, part].flatten(1), norm[part].flatten(), 1e-6) for part in parts]
        expected = torch.cat(normed, dim=1).view_as(expected)
    if rope is not None:  # the angle is float32, as in models/rope.py; its cosine is exact here
        angles = (torch.tensor(positions, dtype=torch.float32)[:, None, None] * frequencies).double()
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        first, second = expected[..., :half], expected[..., half : 2 * half]
        pairs = (first * cos - second * sin, second * cos + first * sin, expected[..., 2 * half :])
        size = torch.cat((first.abs() + second.abs(), first.abs() + second.abs(), pairs[2].abs()), dim=-1)
        expected = torch.cat(pairs, dim=-1)
    else:
        size = expected.abs()
    assert ((got - expected).abs() <= 14 * EPS * magnitude * size).all()


def test_cosines_are_those_of_the_reference(kernels: ModuleType) -> None:
    """Keys (1, 0) turn into (cos, sin): within a unit in the last place of models/rope.py's."""
    frequencies = 500000.0 ** -(torch.arange(32, dtype=torch.float32) / 32)
    rope = RopeSpec(tuple(frequencies.tolist()), 1.0)
    positions = [0, 1, 2, 77, 1000, 8191]
    x = torch.zeros(len(positions), 3, 64)
    x[..., :32] = 1
    got = prepared(kernels, x.flatten(1), positions, (1, 1, 64), rope, None, "head")[:, 1]
    cos, sin = rope.cos_sin(torch.tensor(positions), torch.float32)
    expected = torch.cat((cos, sin), dim=-1)[:, 0]
    assert ((got - expected).abs() <= 2 * EPS * expected.abs() + 1e-12).all()


def test_a_step_of_another_shape_is_refused(kernels: ModuleType) -> None:
    program = kernels.Program(2, 1, 32)
    qkv, out = program.buffer(128), program.buffer(64)
    program.embed(qkv, kernels.Weights(numbers(1, 4, 128)))
    program.attention(out, qkv, 0, scale=1.0)
    ids, nothing = np.arange(4, dtype=np.int64), np.empty((0, 0), np.float32)
    wanted = np.empty(0, np.int32)
    data = np.zeros((1, 2 * BLOCK * 64 * 4), np.uint8)
    piece = BLOCK * 64 * 4
    storage = kernels.KVStorage(data, BLOCK, 1, 64, 64, [(0, 0, piece, piece, "fp32", "fp32")])
    one = np.ones(1, np.int32)
    step = kernels.Step(storage, 0 * one, 4 * one, 0 * one, np.array([0, 1], np.int64), [0])
    with pytest.raises(ValueError, match="other heads"):
        program.run(step, ids, ids, wanted, nothing)
    with pytest.raises(ValueError, match="number of tokens"):
        program.run(step, ids[:3], ids[:3], wanted, nothing)
    with pytest.raises(ValueError, match="needs a step"):
        program.run(None, ids, ids, wanted, nothing)
    with pytest.raises(ValueError, match="token id"):
        program.run(step, ids + 1, ids, wanted, nothing)
    with pytest.raises(ValueError, match="wanted row"):
        program.run(step, ids, ids, np.array([4], np.int32), np.empty((1, 0), np.float32))
