from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.errors import AnaphoraError
from anaphora.storage.calibration import PLACES, Calibration, Calibrator
from anaphora.storage.calibration_text import TEXT
from anaphora.storage.transform import spread

HEADS, DIM = 2, 16


def ran(calibrator: Calibrator, *, spoil: bool = False, **given: object) -> Calibration:
    random = torch.Generator().manual_seed(0)
    tokens = len(calibrator.token_ids)
    for layer in range(3):
        query, key, value = (torch.randn(tokens, heads, DIM, generator=random) for heads in (4, HEADS, HEADS))
        key[:, :, 3] += 5
        if spoil and layer == 1:
            key[tokens // 2] = torch.nan
        out = calibrator(layer, query, key, value, scale=0.25, **given)  # type: ignore[arg-type]
        assert out.shape == query.shape
    return calibrator.result()


def test_segments_stand_all_over_the_context() -> None:
    calibrator = Calibrator(range(600), 8192, 3, HEADS)
    assert len(calibrator.token_ids) == len(calibrator.positions) == 512
    begins = calibrator.positions.view(len(PLACES), -1)[:, 0].tolist()
    assert begins == [0, 128, 512, 1024, 2048, 4096, 6144, 7680]
    assert int(Calibrator(range(600), None, 3, HEADS).positions.max()) < 32768


@settings(deadline=None)
@given(st.integers(1, 700), st.integers(2, 2000))
def test_any_text_in_any_context(tokens: int, context: int) -> None:
    calibrator = Calibrator(range(tokens), context, 3, HEADS)
    assert len(calibrator.token_ids) == len(calibrator.positions) <= 512
    assert 0 <= int(calibrator.positions.min()) <= int(calibrator.positions.max()) < context


def test_segments_attend_to_themselves_causally() -> None:
    calibrator = Calibrator(range(512), 8192, 3, HEADS)
    query, key, value = (torch.randn(512, heads, DIM) for heads in (4, HEADS, HEADS))
    out = calibrator(0, query, key, value, scale=0.25)
    begin, end, head = 3 * 64, 3 * 64 + 30, 3
    weights = (query[end, head] @ key[begin : end + 1, head // 2].T * 0.25).softmax(-1)
    torch.testing.assert_close(out[end, head], weights @ value[begin : end + 1, head // 2])


def test_moments() -> None:
    layer = ran(Calibrator(range(512), 8192, 3, HEADS)).layers[2]
    torch.testing.assert_close(layer.key_mean[:, 3], torch.tensor([5.0, 5.0]), atol=0.4, rtol=0)
    torch.testing.assert_close(layer.key_rms, torch.ones(HEADS, DIM), atol=0.35, rtol=0)
    torch.testing.assert_close(layer.query_rms, torch.ones(HEADS, DIM), atol=0.15, rtol=0)
    torch.testing.assert_close(layer.value_rms, torch.ones(HEADS, DIM), atol=0.15, rtol=0)


def test_a_sink_weighs_what_attention_gives_it() -> None:
    """Every query looks at the segment's first token nearly alone, so the mean is near that token's key."""
    calibrator = Calibrator(range(512), 8192, 1, HEADS)
    query, key, value = (torch.randn(512, heads, DIM) for heads in (4, HEADS, HEADS))
    query[..., 0] = 8.0
    key[::64, :, 0] = 3.0
    calibrator(0, query, key, value, scale=0.25)
    assert bool((calibrator.result().layers[0].key_mean[:, 0] > 2).all())


def test_the_mean_of_keys_stays_where_softmax_is_not_blind_to_it() -> None:
    for given_too in ({"softcap": 30.0}, {"sinks": torch.zeros(4)}):
        layer = ran(Calibrator(range(512), 8192, 3, HEADS), **given_too).layers[0]
        assert not layer.key_mean.any()
        assert bool((layer.key_rms[:, 3] > 4).all())


def test_what_a_broken_model_makes() -> None:
    with pytest.raises(AnaphoraError, match="layer 1 made keys or values that are NaN"):
        ran(Calibrator(range(512), 8192, 3, HEADS), spoil=True)
    with pytest.raises(AnaphoraError, match="skipped layers"):
        ran(Calibrator(range(512), 8192, 4, HEADS))


def test_bytes_and_digest() -> None:
    calibration = ran(Calibrator(range(512), 8192, 3, HEADS))
    raw = calibration.to_bytes()
    again = Calibration.from_bytes(raw)
    assert again is not None
    assert again.digest == calibration.digest
    assert again.to_bytes() == raw
    assert ran(Calibrator(range(512), 8192, 3, HEADS), softcap=30.0).digest != calibration.digest
    other_version = raw.replace(b'"version":', b'"version":9', 1)
    for broken in (b"", b"{}\n", raw[:-1], raw + b"\0\0\0\0", raw[10:], other_version, b"\xff" + raw, b"[1]\n"):
        assert Calibration.from_bytes(broken) is None


@pytest.mark.parametrize("n", [1, 2, 7, 14, 16, 28, 56, 64, 70, 80, 112, 128])
def test_spreading_is_orthogonal_and_even(n: int) -> None:
    turn = spread(n)
    torch.testing.assert_close(turn @ turn.T, torch.eye(n, dtype=torch.float64))
    assert float(turn.abs().max()) <= (2 / n) ** 0.5 + 1e-12


def test_the_text_is_short() -> None:
    assert 1000 < len(TEXT) < 2000
