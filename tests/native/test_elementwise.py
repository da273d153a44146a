from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.native_programs import EPS, numbers, rms_norm, run

random_shapes = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@random_shapes
@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 200),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    scale=st.sampled_from([1.0, 24.0]),
)
def test_embedding(kernels: ModuleType, target: str, rows: int, width: int, dtype: torch.dtype, scale: float) -> None:
    table = numbers(1, 70, width).to(dtype)
    program = kernels.Program()
    out = program.buffer(width)
    program.embed(out, kernels.Weights(table), scale)
    run(program, rows)
    assert np.array_equal(program.values(out), (table[:rows].float() * scale).numpy())


@random_shapes
@given(rows=st.integers(1, 70), width=st.integers(1, 1200), add=st.booleans(), scale=st.sampled_from([1.0, 0.22]))
def test_norm(kernels: ModuleType, target: str, rows: int, width: int, add: bool, scale: float) -> None:
    x, weight, start = numbers(1, rows, width), numbers(2, width), numbers(3, rows, width)
    program = kernels.Program()
    source, out = program.buffer(width), program.buffer(width)
    program.embed(source, kernels.Weights(x))
    program.embed(out, kernels.Weights(start))
    program.norm(out, source, weight, 1e-6, scale=scale, add=add)
    run(program, rows)
    expected = rms_norm(x, weight, 1e-6) * scale
    bound = 8 * EPS * expected.abs()  # of the mean, the root, the division, three products
    if add:
        expected = expected + start
        bound = bound + EPS * expected.abs()
    assert (np.abs(program.values(out) - expected.numpy()) <= bound.numpy() + 1e-30).all()


def test_a_norm_may_write_where_it_reads(kernels: ModuleType, target: str) -> None:
    x, weight = numbers(1, 5, 100), numbers(2, 100)
    program = kernels.Program()
    both, out = program.buffer(100), program.buffer(100)
    program.embed(both, kernels.Weights(x))
    program.norm(out, both, weight, 1e-6)
    program.norm(both, both, weight, 1e-6)
    run(program, 5)
    assert np.array_equal(program.values(both), program.values(out))


@pytest.mark.parametrize("width", [8, 576, 1536])
def test_a_norm_of_large_and_of_no_values(kernels: ModuleType, target: str, width: int) -> None:
    x = torch.zeros(3, width)
    x[1] = 1e15
    x[2, 0] = float("nan")
    program = kernels.Program()
    source, out = program.buffer(width), program.buffer(width)
    program.embed(source, kernels.Weights(x))
    program.norm(out, source, torch.ones(width), 1e-6)
    run(program, 3)
    values = program.values(out)
    assert (values[0] == 0).all()
    assert np.allclose(values[1], 1, rtol=1e-5)
    assert np.isnan(values[2]).all()
