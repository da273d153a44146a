"""The sum of a real model's cache written out, one product per kind of layer (size.py has the plain formula)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from anaphora.errors import ConfigError
from anaphora.geometry.layers import Keeps, LayerKV
from anaphora.geometry.model import LayerGroup, ModelGeometry


@dataclass(frozen=True, slots=True)
class KVDtype:
    """How one number of the cache is stored."""

    name: str
    element: Fraction
    """Bytes of a number."""
    scale: int = 0
    """Bytes beside them for each token and KV head, once for keys and once for values."""

    def token_bytes(self, layer: LayerKV) -> Fraction:
        """Bytes of one token's keys and values in one layer."""
        sides = (layer.key_dim > 0) + (layer.value_dim > 0)
        return layer.kv_heads * ((layer.key_dim + layer.value_dim) * self.element + sides * self.scale)


KV_DTYPES: dict[str, KVDtype] = {
    dtype.name: dtype
    for dtype in (
        KVDtype("float32", Fraction(4)),
        KVDtype("bfloat16", Fraction(2)),
        KVDtype("float16", Fraction(2)),
        KVDtype("fp8", Fraction(1)),
        KVDtype("int8", Fraction(1), scale=4),
        KVDtype("int4", Fraction(1, 2), scale=4),
        KVDtype("q8_0", Fraction(34, 32)),
        KVDtype("q5_1", Fraction(24, 32)),
        KVDtype("q5_0", Fraction(22, 32)),
        KVDtype("q4_1", Fraction(20, 32)),
        KVDtype("q4_0", Fraction(18, 32)),
        KVDtype("iq4_nl", Fraction(18, 32)),
    )
}
"""fp8 with one scale a tensor; int8 and int4 with a float32 scale per token and head; llama.cpp's blocks of 32."""
KV_DTYPES |= {"bf16": KV_DTYPES["bfloat16"], "f16": KV_DTYPES["float16"], "f32": KV_DTYPES["float32"]}


def kv_dtype(name: str) -> KVDtype:
    """A stored form by name. Raises ConfigError."""
    found = KV_DTYPES.get(name)
    if found is None:
        raise ConfigError(f"KV dtype {name!r} is not known; choose one of {', '.join(KV_DTYPES)}")
    return found


@dataclass(frozen=True, slots=True)
class Term:
    """One product of the sum."""

    keeps: str
    layers: int
    product: str
    """Written out: '2 x 28 layers x 4 KV heads x 128 x 8,192 tokens x 2 bytes'."""
    bytes_per_token: Fraction
    """Of one sequence, while inside the window; 0 for what does not grow."""
    grows: bool
    """Whether a further token adds to it at this length."""
    total_bytes: int
    """Of the whole batch."""
    note: str = ""


def terms(geometry: ModelGeometry, tokens: int, batch: int, dtype: KVDtype) -> list[Term]:
    """The sum for `batch` sequences of `tokens`, per kind of layer. Raises ConfigError for what is not positive."""
    for name, value in (("tokens", tokens), ("batch", batch)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; give a positive whole number")
    return [term for group in geometry.groups() for term in _of_group(group, tokens, batch, dtype)]


def total_bytes(found: list[Term]) -> int:
    """Of all terms."""
    return sum(term.total_bytes for term in found)


def _of_group(group: LayerGroup, tokens: int, batch: int, dtype: KVDtype) -> Iterator[Term]:
    layer, count = group.layer, group.count
    many = f" x {batch:,} sequences" if batch > 1 else ""
    if layer.kv_heads:
        kept = min(tokens, layer.window or tokens)
        each = dtype.token_bytes(layer)
        total = _up(each * kept) * count * batch
        note = f"only the last {layer.window:,} of {tokens:,} tokens are kept" if kept < tokens else ""
        yield Term(
            str(layer.keeps),
            count,
            f"{_width(layer, count, dtype)} x {kept:,} tokens{many}",
            each * count,
            kept < (layer.window or tokens + 1),
            total,
            note,
        )
    for cache in layer.side:
        size = cache.bytes_at(tokens, 1) if cache.element_bytes else _up(cache.bytes_at(tokens, 1) * dtype.element)
        grows = Fraction(0)
        if cache.fixed_entries is None:
            grows = Fraction(cache.width * count, cache.tokens_per_entry) * (cache.element_bytes or dtype.element)
        entries = cache.fixed_entries or min(tokens, cache.window or tokens) // cache.tokens_per_entry
        product = f"{count} layers x {entries:,} entries x {cache.width} x {_element(cache.element_bytes, dtype)}{many}"
        growing = cache.fixed_entries is None and tokens < (cache.window or tokens + 1)
        yield Term(f"{layer.keeps}: {cache.name}", count, product, grows, growing, size * count * batch)
    if layer.state:
        shapes = " + ".join(" x ".join(str(n) for n in shape) for shape in layer.state.shapes())
        total = layer.state.bytes() * count * batch
        yield Term(
            f"{layer.state.family} state",
            count,
            f"{count} layers x ({shapes}), {layer.state.bytes():,} bytes{many}",
            Fraction(0),
            False,
            total,
            "the same at every length",
        )
    if layer.keeps in (Keeps.SHARED, Keeps.NOTHING) or not (layer.kv_heads or layer.side or layer.state):
        yield Term(str(layer.keeps), count, f"{count} layers x 0 bytes", Fraction(0), False, 0)


def _width(layer: LayerKV, count: int, dtype: KVDtype) -> str:
    """'2 x 28 layers x 4 KV heads x 128 x 2 bytes', with keys and values apart where they differ."""
    element = _element(None, dtype)
    scales = f" + {dtype.scale} bytes of scale" if dtype.scale else ""
    if layer.value_dim == 0:
        return f"{count} layers x {layer.key_dim} x {element}{scales}"
    if layer.key_dim == layer.value_dim:
        inner = f"({layer.key_dim} x {element}{scales})" if scales else f"{layer.key_dim} x {element}"
        return f"2 x {count} layers x {layer.kv_heads} KV heads x {inner}"
    return f"{count} layers x {layer.kv_heads} KV heads x ({layer.key_dim} + {layer.value_dim}) x {element}{scales}"


def _element(own: int | None, dtype: KVDtype) -> str:
    size = Fraction(own) if own else dtype.element
    return f"{float(size):g} byte{'' if size == 1 else 's'}"


def _up(value: Fraction | int) -> int:
    return -(-Fraction(value).numerator // Fraction(value).denominator)
