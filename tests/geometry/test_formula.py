"""The formula as a function, and the sum written out per kind of layer: the worked examples to the byte."""

from __future__ import annotations

from fractions import Fraction
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora import KVCacheSize, kv_cache_size
from anaphora.errors import ConfigError
from anaphora.geometry.formula import KV_DTYPES, kv_dtype, terms, total_bytes
from anaphora.geometry.model import ModelGeometry
from support.facts import Fact, facts


def test_worked_examples() -> None:
    """Qwen2.5-7B and Llama-3-70B, as everybody's notes have them."""
    qwen = kv_cache_size(28, 4, 128, 8192)
    assert qwen == KVCacheSize(57_344, 469_762_048)
    assert (qwen.per_token, qwen.total) == ("56 KiB", "448 MiB")
    assert kv_cache_size(28, 4, 128, 32_768).total == "1.75 GiB"
    assert kv_cache_size(28, 4, 128, 32_768, batch_size=16).total == "28 GiB"
    llama = kv_cache_size(80, 8, 128, 1)
    assert llama.bytes_per_token == 327_680
    assert 8 * llama.bytes_per_token == kv_cache_size(80, 64, 128, 1).bytes_per_token
    assert kv_cache_size(28, 4, 128, 8192, dtype_bytes=1).total_bytes == 234_881_024
    assert kv_cache_size(28, 4, 128, 8192, dtype_bytes=0.5).total_bytes == 117_440_512


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0, 4, 128, 8192), "num_layers is 0"),
        ((28, -4, 128, 8192), "num_kv_heads is -4"),
        ((28, 4, 128.0, 8192), "head_dim is 128.0"),
        ((28, 4, 128, True), "sequence_length is True"),
        ((28, 4, 128, 8192, 0), "dtype_bytes is 0"),
        ((28, 4, 128, 8192, float("nan")), "dtype_bytes is nan"),
        ((1, 1, 1, 8192, 0.3), "do not make whole bytes"),
        ((28, 4, 128, 8192, 2, 0), "batch_size is 0"),
    ],
)
def test_absurd_numbers(arguments: tuple[int, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kv_cache_size(*arguments)


@given(
    st.lists(st.integers(1, 200), min_size=4, max_size=4),
    st.integers(0, 3),
    st.sampled_from([0.5, 1, 2, 4]),
    st.integers(1, 9),
)
def test_monotone_and_linear(sizes: list[int], which: int, dtype_bytes: float, batch: int) -> None:

    def size(layers: int, heads: int, width: int, length: int) -> int:
        return kv_cache_size(layers, heads, width, length, dtype_bytes, batch).total_bytes

    first, second, third, fourth = sizes
    assert size(first, second, third, fourth) == 2 * prod(sizes) * dtype_bytes * batch
    a, b, c, d = (value + (i == which) for i, value in enumerate(sizes))
    assert size(a, b, c, d) > size(first, second, third, fourth)


@pytest.mark.parametrize("fact", facts(), ids=lambda fact: fact.model)
def test_terms_add_up_to_the_geometry(fact: Fact) -> None:
    geometry = ModelGeometry.from_config(fact.config)
    for tokens in (1, 127, 8192, 100_000):
        for batch in (1, 3):
            found = terms(geometry, tokens, batch, kv_dtype("bfloat16"))
            assert total_bytes(found) == geometry.sequence_bytes(tokens) * batch
            assert sum(term.layers for term in found) >= len(geometry.layers)
    inside = sum(term.bytes_per_token for term in terms(geometry, 1, 1, kv_dtype("bf16")))
    assert geometry.bytes_per_token(2) - 1 < inside <= geometry.bytes_per_token(2)


def test_the_product_is_written_out() -> None:
    [term] = terms(ModelGeometry.from_catalog("Qwen/Qwen2.5-7B-Instruct"), 8192, 1, kv_dtype("bfloat16"))
    left, _, right = term.product.partition(" tokens")
    assert term.product == "2 x 28 layers x 4 KV heads x 128 x 2 bytes x 8,192 tokens"
    numbers = [int(word.replace(",", "")) for word in left.split() if word.replace(",", "").isdigit()]
    assert prod(numbers) == term.total_bytes == 469_762_048
    assert right == ""


def test_windows_stop_growing() -> None:
    geometry = ModelGeometry.from_catalog("google/gemma-3-27b-it")
    inside, beyond = (terms(geometry, tokens, 1, kv_dtype("bf16")) for tokens in (1000, 1024))
    assert all(term.grows for term in inside)
    assert sum(term.bytes_per_token for term in beyond if term.grows) == 2 * 10 * 16 * 128 * 2
    assert geometry.sequence_bytes(1025) - geometry.sequence_bytes(1024) == 2 * 10 * 16 * 128 * 2
    assert geometry.sequence_bytes(1001) - geometry.sequence_bytes(1000) == geometry.bytes_per_token()


def test_quantised_caches_count_their_scales() -> None:
    geometry = ModelGeometry.from_catalog("Qwen/Qwen2.5-7B-Instruct")

    def size(name: str) -> int:
        return total_bytes(terms(geometry, 8192, 1, kv_dtype(name)))

    assert 2 * size("fp8") == size("bfloat16")
    assert size("int8") == size("fp8") + 2 * 28 * 4 * 8192 * 4
    assert size("int4") == size("fp8") // 2 + 2 * 28 * 4 * 8192 * 4
    assert Fraction(size("q8_0"), size("f16")) == Fraction(34, 64)
    order = ["float32", "bfloat16", "q8_0", "int8", "fp8", "q5_1", "q5_0", "q4_1", "q4_0", "int4"]
    assert [size(name) for name in order] == sorted((size(name) for name in order), reverse=True)
    with pytest.raises(ConfigError, match="KV dtype 'int3' is not known; choose one of float32"):
        kv_dtype("int3")
    with pytest.raises(ConfigError, match="tokens is 0"):
        terms(geometry, 0, 1, KV_DTYPES["bf16"])
