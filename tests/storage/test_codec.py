from __future__ import annotations

import pytest
import torch

from anaphora.errors import AnaphoraError, ConfigError
from anaphora.geometry.kv_dtype import NAMES, BlockMap, kv_dtype
from anaphora.geometry.layout import CacheGroup, CacheLayout
from anaphora.storage.calibration import Calibration, LayerMoments
from anaphora.storage.codec import Codec, codec_for


def one_group(layers: int, kv_heads: int, dim: int, block_size: int = 16) -> CacheLayout:
    return CacheLayout((CacheGroup(None, tuple(range(layers))),), layers, kv_heads, dim, dim, block_size)


SMOLLM2 = one_group(30, 3, 64)
QWEN25_7B = one_group(28, 4, 128)
LLAMA3_70B = one_group(80, 8, 128)
TWO_KINDS = CacheLayout((CacheGroup(None, (0, 2)), CacheGroup(8, (1, 3))), 2, 3, 64, 64, 16)


@pytest.mark.parametrize(
    ("name", "smollm2", "qwen", "llama"),
    [
        ("fp32", 46_080, 114_688, 655_360),
        ("bf16", 23_040, 57_344, 327_680),
        ("fp16", 23_040, 57_344, 327_680),
        ("fp8_e4m3", 11_880, 29_568, 168_960),
        ("int8", 12_240, 30_464, 174_080),
        ("k8v4", 9_720, 24_192, 138_240),
        ("int4", 7_020, 17_248, 98_560),
    ],
)
def test_bytes_per_token(name: str, smollm2: int, qwen: int, llama: int) -> None:
    codecs = [codec_for(name, layout) for layout in (SMOLLM2, QWEN25_7B, LLAMA3_70B)]
    assert [codec.bytes_per_token for codec in codecs] == [smollm2, qwen, llama]
    assert [codec.block_bytes for codec in codecs] == [16 * smollm2, 16 * qwen, 16 * llama]


@pytest.mark.parametrize(("name", "goal"), [("fp8_e4m3", 1.93), ("int8", 1.88), ("k8v4", 2.35), ("int4", 3.2)])
@pytest.mark.parametrize("layout", [SMOLLM2, QWEN25_7B])
def test_tokens_per_gib(name: str, goal: float, layout: CacheLayout) -> None:
    assert codec_for("bf16", layout).bytes_per_token / codec_for(name, layout).bytes_per_token >= goal


@pytest.mark.parametrize("name", NAMES)
def test_pieces_are_what_the_encoder_makes(name: str) -> None:
    layer = codec_for(name, SMOLLM2).layer(7)
    for form, piece_bytes in ((layer.key, layer.key_bytes), (layer.value, layer.value_bytes)):
        codes, scales = form.encode(torch.randn(1, 64))
        assert piece_bytes == 16 * (codes.shape[1] + scales.shape[1])


def test_skipped_layers_are_plain_and_slots_keep_their_place() -> None:
    dtype = kv_dtype("int4", own="bfloat16", skip_layers=[0])
    codec = Codec(dtype, TWO_KINDS)
    plain, small = 3 * 16 * 256, 3 * 16 * 78
    assert codec.bytes_per_token == 3 * (256 + 3 * 78)
    assert codec.block_bytes == plain + small  # slot 0 is layer 0's or layer 1's, and as large as the larger
    assert [codec.layer(index).offset for index in range(4)] == [0, 0, plain, plain]
    assert codec.layer(0).key.size.name == codec.layer(0).value.size.name == "bf16"
    assert codec.layer(1).key.size.name == "int4_keys"
    assert codec.layer(0).key_transform is None
    assert codec.layer(0).value_transform is None
    assert codec.layer(1).key_transform is not None


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("auto", None, None, "fp16"),
        ("k8v4", None, None, "k8v4"),
        ("int8", None, "int4", "k8v4"),
        ("k8v4", None, "int8", "int8"),
        ("auto", "int8", None, "keys int8, values fp16"),
        ("FP8", None, None, "fp8_e4m3"),
    ],
)
def test_names(name: str, key: str | None, value: str | None, said: str) -> None:
    assert kv_dtype(name, own="float16", key=key, value=value).name == said


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype 'int9' is not known; did you mean int"):
        kv_dtype("int9")
    with pytest.raises(ConfigError, match=r"--k-dtype 'bf17' is not known; did you mean bf16\?"):
        kv_dtype("int8", key="bf17")
    with pytest.raises(ConfigError, match="--v-dtype 'k8v4' is not known"):
        kv_dtype("int8", value="k8v4")


def test_widths_and_layers_that_do_not_suit() -> None:
    with pytest.raises(ConfigError, match=r"multiple of 16, and this model's is 72. Possible here: fp32, bf16, fp16$"):
        codec_for("int8", one_group(2, 1, 72))
    with pytest.raises(ConfigError, match="names layer 30; this model has 0 to 29"):
        BlockMap(SMOLLM2, kv_dtype("int8", skip_layers=[0, 30]))


def calibration(seed: int, layers: int = 30, heads: int = 3, dim: int = 64) -> Calibration:
    random = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        return torch.randn(heads, dim, generator=random)

    return Calibration(
        tuple(
            LayerMoments(draw().exp(), draw() * 3, draw().exp(), draw()[:, :1].exp().expand(heads, dim))
            for _ in range(layers)
        )
    )


def test_names_carry_the_calibration_where_it_matters() -> None:
    names = {codec_for("int8", SMOLLM2, calibration=c).name for c in (None, calibration(1), calibration(2))}
    assert len(names) == 3
    assert all(name.startswith("int8-") for name in names)
    assert codec_for("int8", SMOLLM2, calibration=calibration(1)).name in names
    assert codec_for("bf16", SMOLLM2, calibration=calibration(1)).name == "bf16"
    long = Codec(kv_dtype("int8", value="bf16", skip_layers=range(20)), SMOLLM2)
    other = Codec(kv_dtype("int8", value="bf16", skip_layers=range(19)), SMOLLM2)
    assert long.name != other.name
    assert max(map(len, [*names, long.name])) <= 32


def test_nothing_that_is_not_finite_is_kept() -> None:
    layer = codec_for("int8", SMOLLM2).layer(11)
    query, good, bad = torch.randn(5, 9, 64), torch.randn(5, 3, 64), torch.randn(5, 3, 64)
    layer.before(query, good, good)
    bad[2, 1, 7] = torch.nan
    with pytest.raises(AnaphoraError, match=r"layer 11 made keys that are NaN.*float32"):
        layer.before(query, bad, good)
    bad[2, 1, 7] = torch.inf
    with pytest.raises(AnaphoraError, match="layer 11 made values"):
        layer.before(query, good, bad)


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "int4", "k8v4"])
@pytest.mark.parametrize("known", [None, calibration(5)])
def test_attention_over_transformed_is_attention(name: str, known: Calibration | None) -> None:
    """Softmax over transformed queries and keys, and the output brought back, is that over the originals."""
    layer = codec_for(name, SMOLLM2, calibration=known).layer(4)
    random = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(40, heads, 64, generator=random) for heads in (9, 3, 3))
    if known is not None:
        key = key * known.layers[4].key_rms + known.layers[4].key_mean
        query = query * known.layers[4].query_rms.repeat_interleave(3, dim=0)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(3, dim=1) for x in (k, v))
        weights = (torch.einsum("ihd,jhd->hij", q, k) / 64).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, v)

    exact = attend(query, key, value)
    turned = layer.after(attend(*layer.before(query, key, value)))
    torch.testing.assert_close(turned, exact, atol=2e-4, rtol=2e-4)


def test_fewer_errors_where_the_model_is_known() -> None:
    """Channels of very different sizes, as RoPE models have them: the calibration must be worth its while."""
    known = calibration(5)
    moments = known.layers[0]
    random = torch.Generator().manual_seed(3)
    key = torch.randn(500, 3, 64, generator=random) * moments.key_rms + moments.key_mean
    query = torch.randn(500, 3, 64, generator=random) * moments.query_rms

    def error(name: str, known: Calibration | None) -> float:
        layer = codec_for(name, SMOLLM2, calibration=known).layer(0)
        transform = layer.key_transform
        assert transform is not None
        kept = transform.of_keys(key)
        flat = kept.flatten(0, 1)
        lost = layer.key.decode(*layer.key.encode(flat), 64).view_as(kept) - kept
        return float((lost * transform.of_queries(query)).sum(-1).square().mean())

    assert error("int8", known) < 0.3 * error("int8", None)
    assert error("int4", known) < 0.1 * error("int4", None)
