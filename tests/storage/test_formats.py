from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anaphora.storage.formats import FORMATS
from anaphora.storage.formats.base import Format

quick = settings(deadline=None, max_examples=60)
DIMS = (16, 48, 64, 80, 96, 128, 256)
SPECIAL = ("plain", "zeros", "tiny", "denormal", "huge channel", "one outlier", "constant", "large", "mixed rows")


def vectors(kind: str, seed: int, rows: int, dim: int) -> Tensor:
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    match kind:
        case "zeros":
            x.zero_()
        case "tiny":
            x *= 1e-6
        case "denormal":
            x *= 1e-40
        case "huge channel":
            x[:, seed % dim] *= 1000
        case "one outlier":
            x[seed % rows, seed % dim] = 3e4
        case "constant":
            x = x[:, :1].expand(rows, dim).contiguous()
        case "large":
            x *= 1e4
        case "mixed rows":
            x *= torch.logspace(-8, 4, rows)[:, None]
    return x


cases = st.builds(
    vectors, st.sampled_from(SPECIAL), st.integers(0, 1000), st.integers(1, 9), st.sampled_from(DIMS)
)  # every width suits every format


def passed(form: Format, x: Tensor) -> Tensor:
    return form.decode(*form.encode(x), x.shape[1])


def group_largest(x: Tensor, group: int) -> Tensor:
    """max |x| of each element's group, [N, dim]."""
    parts = [part.abs().amax(1, keepdim=True).expand_as(part) for part in torch.split(x, group, dim=1)]
    return torch.cat(parts, dim=1)


TINY = 128 * 2.0**-25
"""What is lost below the smallest float16: half of a scale's step times the largest code."""


@quick
@given(cases)
def test_int8_is_within_half_a_step(x: Tensor) -> None:
    step = group_largest(x, 32) / 127
    assert bool(((passed(FORMATS["int8"], x) - x).abs() <= step * (0.5 + 127 * 2**-11) + TINY).all())


@quick
@given(cases)
def test_fp8_is_within_a_sixteenth_of_the_element(x: Tensor) -> None:
    """Three bits of mantissa: half a unit is 2^-4; below 2^-6 of the scale's unit the steps are even, 2^-9."""
    least = group_largest(x, 64) / 448 * 2.0**-9
    error = (passed(FORMATS["fp8_e4m3"], x) - x).abs()
    assert bool((error <= torch.maximum(x.abs() * (2.0**-4 + 2.0**-10), least) + 512 * 2.0**-25).all())


@quick
@given(cases)
def test_int4_values_err_no_more_than_the_plain_scale(x: Tensor) -> None:
    """Half a step, one where the far end is clipped; the scale is rounded by a sixteenth, or by 2^-10 where it is tiny.

    Elements beyond 8 * 448 are clipped: the transform makes them about 1.
    """
    x = x.clamp(-3000, 3000)
    step = group_largest(x, 8) / 8
    rounding = torch.maximum(step * 2**-4, torch.tensor(2.0**-10))
    most = torch.where(x.abs() >= 7.4 * step, step, step / 2) + rounding * 8
    error = passed(FORMATS["int4_values"], x) - x
    for lost, bound in zip(torch.split(error, 8, dim=1), torch.split(most, 8, dim=1), strict=True):
        assert bool((lost.square().sum(1) <= bound.square().sum(1)).all())


@quick
@given(cases)
def test_int4_keys_err_no_more_than_the_plain_scale(x: Tensor) -> None:
    wide = x.shape[1] // 8
    step = torch.maximum(x[:, wide:].abs().amax(1) / 8, x[:, :wide].abs().amax(1) * 8 / 127)[:, None]
    most = torch.where(x.abs() >= 7.49 * step, step, step / 2)
    most[:, :wide] = step / 16
    error = passed(FORMATS["int4_keys"], x) - x
    bound = most * (1 + 2**-7) + x.abs() * 2**-10 + TINY
    assert bool((error.square().sum(1) <= bound.square().sum(1)).all())


@quick
@given(cases, st.sampled_from(sorted(FORMATS)))
def test_a_token_alone_is_the_token_in_a_batch(x: Tensor, name: str) -> None:
    form = FORMATS[name]
    codes, scales = form.encode(x)
    for i in range(len(x)):
        alone_codes, alone_scales = form.encode(x[i : i + 1])
        assert torch.equal(alone_codes[0], codes[i])
        assert torch.equal(alone_scales[0], scales[i])
    backwards = form.encode(x.flip(0))
    assert torch.equal(backwards[0].flip(0), codes)
    strided = form.encode(torch.stack([x, x + 1], dim=1)[:, 0])
    assert torch.equal(strided[0], codes)


@quick
@given(cases, st.sampled_from(sorted(FORMATS)))
def test_bytes_are_as_stated(x: Tensor, name: str) -> None:
    form = FORMATS[name]
    codes, scales = form.encode(x)
    assert codes.dtype == scales.dtype == torch.uint8
    assert codes.shape == (len(x), form.size.code_bytes(x.shape[1]))
    assert scales.shape == (len(x), form.size.scale_bytes(x.shape[1]))


@quick
@given(cases, st.sampled_from(sorted(FORMATS)))
def test_what_is_read_is_finite(x: Tensor, name: str) -> None:
    assert bool(passed(FORMATS[name], x).isfinite().all())


@quick
@given(st.integers(0, 1000), st.integers(1, 9))
def test_plain_formats_keep_what_their_dtype_keeps(seed: int, dim: int) -> None:
    x = vectors("plain", seed, 4, dim)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert torch.equal(passed(FORMATS[name], x), x.to(dtype).float())


@pytest.mark.parametrize(
    ("name", "most"), [("int8", 2.9e-5), ("fp8_e4m3", 7e-4), ("int4_values", 4.3e-3), ("int4_keys", 8e-3)]
)
def test_error_of_normal_numbers(name: str, most: float) -> None:
    """Squared, relative: what the formats are worth on spread vectors, within a few per cent."""
    x = vectors("plain", 1, 4000, 64)
    assert float((passed(FORMATS[name], x) - x).square().mean()) < most


def test_nibbles_lie_even_element_low() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = -8.0, 3.0  # the extreme decides the scale: 1
    codes, scales = FORMATS["int4_values"].encode(x)
    assert scales.shape == (1, 4)
    assert scales.view(torch.float8_e4m3fn)[0, 0].item() == 1.0
    assert codes[0, 0].item() == 0 | 11 << 4
    assert codes[0, 1].item() == 8 | 8 << 4


def test_wide_keys_lie_first_in_eighths_of_a_step() -> None:
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 8], x[0, 9] = -0.5, -8.0, 7.0
    codes, scales = FORMATS["int4_keys"].encode(x)
    assert scales.view(torch.float16).item() == 1.0
    assert codes.shape == (1, 8 + 28)
    assert codes[0, 0].view(torch.int8).item() == -4
    assert codes[0, 8].item() == 0 | 15 << 4
