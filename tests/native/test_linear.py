from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from support.native_programs import EPS, linear, logits, numbers, product_bound, rms_norm

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
random_shapes = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
DTYPES = [torch.bfloat16, torch.float32]


@random_shapes
@given(
    rows=st.integers(1, 70),
    inputs=st.one_of(st.integers(1, 90), st.sampled_from([511, 512, 513, 1024, 1500])),
    outputs=st.integers(1, 90),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    norm=st.booleans(),
    add=st.booleans(),
    scale=st.sampled_from([1.0, 0.22]),
)
def test_any_product_is_that_of_float64(
    kernels: ModuleType,
    target: str,
    rows: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    bias: bool,
    norm: bool,
    add: bool,
    scale: float,
) -> None:
    x, weight = numbers(1, rows, inputs), numbers(2, outputs, inputs).to(dtype)
    shift = numbers(3, outputs) if bias else None
    norm_weight = 1 + numbers(4, inputs) / 8 if norm else None
    start = numbers(5, rows, outputs) if add else None
    weights = kernels.Weights(weight, shift)
    got = linear(kernels, x, weights, start, norm=norm_weight, norm_eps=1e-5, scale=scale, add=add)

    wide = x.double() if norm_weight is None else rms_norm(x, norm_weight, 1e-5)
    expected = wide @ weight.double().T
    bound = product_bound(wide, weight, norm)
    if shift is not None:
        expected = expected + shift
        bound = bound + EPS * expected.abs()
    expected, bound = expected * scale, bound * scale + EPS * (expected * scale).abs()
    if start is not None:
        expected = expected + start
        bound = bound + EPS * expected.abs()
    assert ((got - expected).abs() <= bound).all()


@random_shapes
@given(rows=st.integers(1, 20), inputs=st.integers(1, 600), outputs=st.integers(1, 50), bias=st.booleans())
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_gate_times_other_half(
    kernels: ModuleType, target: str, activation: str, rows: int, inputs: int, outputs: int, bias: bool
) -> None:
    x, weight = numbers(1, rows, inputs), (numbers(2, 2 * outputs, inputs) * 3 / inputs**0.5).bfloat16()
    shift = numbers(3, 2 * outputs) if bias else None
    weights = kernels.Weights(weight, shift, gated=True)
    assert weights.outputs == outputs
    got = linear(kernels, x, weights, activation=activation)

    wide = x.double() @ weight.double().T + (0 if shift is None else shift.double())
    gate, other = wide.chunk(2, dim=1)
    expected = FUNCTIONS[activation](gate) * other
    off_gate, off_other = (product_bound(x, weight) + 2 * EPS * wide.abs()).chunk(2, dim=1)
    # no activation is steeper than 1.13, and its own error is a few units of its argument
    bound = (1.13 * off_gate + 8 * EPS * gate.abs()) * other.abs() + 1.13 * gate.abs() * off_other + 1e-12
    assert ((got - expected).abs() <= bound * 1.1).all()


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_activations_over_their_whole_range(kernels: ModuleType, target: str, activation: str) -> None:
    x = torch.cat([torch.linspace(-100, 100, 4001), torch.linspace(-2, 2, 4001), torch.tensor([0.0, -0.0, 1e30])])
    weights = kernels.Weights(torch.tensor([[1.0], [0.0]]), torch.tensor([0.0, 1.0]), gated=True)
    got = linear(kernels, x[:, None], weights, activation=activation)[:, 0]
    expected = FUNCTIONS[activation](x.double())
    assert ((got - expected).abs() <= 6 * EPS * torch.maximum(expected.abs(), x.abs().clamp(max=1)) + 1e-37).all()


@pytest.mark.parametrize("activation", [None, *FUNCTIONS])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(kernels: ModuleType, target: str, activation: str | None, poison: float) -> None:
    x, weight = numbers(1, 9, 40), numbers(2, 64, 40).abs().bfloat16()
    x[4, 7] = poison
    got = linear(kernels, x, kernels.Weights(weight, gated=activation is not None), activation=activation)
    assert not got[4].isfinite().any()
    assert got[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(576, 960), (1536, 577), (33, 31)])
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    kernels: ModuleType, target: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    inputs, outputs = shape
    x, weights = numbers(1, 230, inputs), kernels.Weights(numbers(2, outputs, inputs).to(dtype))
    norm = 1 + numbers(3, inputs) / 8
    before = kernels.threads()
    try:
        whole = linear(kernels, x, weights, norm=norm, norm_eps=1e-6)
        for threads in (1, 2, 3, 4):
            kernels.set_threads(threads)
            for begin, end in ((0, 1), (7, 8), (3, 9), (20, 90), (97, 230), (0, 230)):
                part = linear(kernels, x[begin:end].contiguous(), weights, norm=norm, norm_eps=1e-6)
                assert torch.equal(part, whole[begin:end])
    finally:
        kernels.set_threads(before)


def test_logits_of_the_wanted_rows(kernels: ModuleType, target: str) -> None:
    x, weight = numbers(1, 12, 72), numbers(2, 83, 72).bfloat16()
    norm = 1 + numbers(3, 72) / 8
    wanted = [11, 0, 5, 5]
    got = logits(kernels, x, kernels.Weights(weight), wanted, norm=norm, norm_eps=1e-6, scale=1 / 8, softcap=30.0)
    wide = rms_norm(x[wanted], norm, 1e-6)
    expected = torch.tanh(wide @ weight.double().T / 8 / 30) * 30
    bound = product_bound(wide, weight, norm=True) / 8 + 8 * EPS * expected.abs()
    assert ((got - expected).abs() <= bound).all()


def test_softcap_over_its_whole_range(kernels: ModuleType, target: str) -> None:
    x = torch.cat([torch.linspace(-400, 400, 4001), torch.linspace(-30, 30, 4001), torch.tensor([1e-20, 1e30])])
    got = logits(kernels, x[:, None], kernels.Weights(torch.ones(1, 1)), list(range(len(x))), softcap=30.0)[:, 0]
    expected = torch.tanh(x.double() / 30) * 30
    assert ((got - expected).abs() <= 6 * EPS * expected.abs()).all()


def test_what_does_not_fit_is_refused(kernels: ModuleType) -> None:
    program = kernels.Program()
    narrow, wide = program.buffer(8), program.buffer(9)
    weights = kernels.Weights(numbers(1, 9, 8))
    attempts: tuple[Callable[[], object], ...] = (
        lambda: kernels.Weights(numbers(1, 9, 8).half()),
        lambda: kernels.Weights(numbers(1, 9, 8), gated=True),
        lambda: kernels.Weights(numbers(1, 9, 8), numbers(1, 8)),
        lambda: program.linear(wide, wide, weights),
        lambda: program.linear(narrow, narrow, weights),
        lambda: program.linear(7, narrow, weights),
        lambda: program.linear(wide, narrow, weights, activation="swish"),
        lambda: program.linear(wide, narrow, weights, norm=numbers(1, 9)),
        lambda: program.norm(wide, narrow, numbers(1, 8), 1e-6),
        lambda: program.embed(wide, weights),
        lambda: program.buffer(0),
        lambda: kernels.set_target("z80"),
        lambda: kernels.set_threads(0),
    )
    for attempt in attempts:
        with pytest.raises(ValueError, match=r"\w"):
            attempt()
