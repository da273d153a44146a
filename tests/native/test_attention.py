from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.attention_cases import APART, LAYER, PLAIN, SCALED, Rules, Sequences, Shape

STRATEGIES = ["chosen", "by_partition", "by_query"]

random_shapes = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
dims = st.one_of(st.sampled_from([32, 64, 80, 96, 112, 128, 256]), st.integers(32, 96))


def fitted(shape: Shape) -> Shape:
    """Formats with scales have dims that are multiples of 16."""
    if shape.kv_dtype in PLAIN:
        return shape
    return replace(shape, key_dim=-(-shape.key_dim // 16) * 16, value_dim=-(-shape.value_dim // 16) * 16)


shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    per_head=st.integers(1, 16),
    key_dim=dims,
    value_dim=dims,
    block_size=st.sampled_from([16, 32, 64, 256]),
    kv_dtype=st.sampled_from(PLAIN + SCALED + APART),
    window=st.one_of(st.none(), st.integers(1, 600)),
).map(fitted)
parts = st.tuples(
    st.one_of(st.integers(0, 40), st.integers(0, 700), st.sampled_from([255, 256, 257, 511, 512])),
    st.one_of(st.just(1), st.integers(1, 40)),
)


def check(sequences: Sequences, rows: list[tuple[int, int, int]], rules: Rules, strategy: str) -> None:
    before = [(number, 0, start) for number, start, _ in rows if start]
    if before:
        sequences.write(before)
    for row, got in zip(rows, sequences.attend(rows, rules, strategy), strict=True):
        expected, bound = sequences.reference(row, rules)
        worst = ((got - expected).abs() / bound).max().item()
        assert worst <= 1, f"row {row}: {worst:.2f} times the bound"


@random_shapes
@given(
    shape=shapes,
    rows=st.lists(parts, min_size=1, max_size=4),
    strategy=st.sampled_from(STRATEGIES),
    softcap=st.sampled_from([0.0, 0.0, 3.0, 50.0]),
    alibi=st.booleans(),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_attention_is_that_of_float64(
    kernels: ModuleType,
    target: str,
    shape: Shape,
    rows: list[tuple[int, int]],
    strategy: str,
    softcap: float,
    alibi: bool,
    sinks: bool,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    heads = shape.query_heads
    slopes = torch.rand(heads, generator=random) / 4 if alibi else None
    sink = torch.randn(heads, generator=random) * 3 if sinks else None
    rules = Rules(shape.key_dim**-0.5 * 2, softcap, slopes, sink)
    sequences = Sequences(kernels, shape, [start + count for start, count in rows], seed=seed)
    check(sequences, [(i, *row) for i, row in enumerate(rows)], rules, strategy)


@pytest.mark.parametrize("dim", [1, 8, 12, 17])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_heads_narrower_than_the_vectors(kernels: ModuleType, target: str, dim: int, strategy: str) -> None:
    sequences = Sequences(kernels, Shape(2, 2, dim, dim + 1), [301, 30])
    check(sequences, [(0, 300, 1), (1, 0, 30)], Rules(), strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("window", [None, 300])
def test_shared_blocks_give_each_row_its_own(
    kernels: ModuleType, target: str, strategy: str, window: int | None
) -> None:
    lengths = [400, 401, 430, 600, 720, 433]
    sequences = Sequences(kernels, Shape(window=window), lengths, shared=384)
    sequences.write([(0, 0, 384)])
    sequences.write([(i, 384, length - 385) for i, length in enumerate(lengths)])
    rows = [(i, length - 1, 1) for i, length in enumerate(lengths)]
    for row, got in zip(rows, sequences.attend(rows, Rules(), strategy), strict=True):
        expected, bound = sequences.reference(row, Rules())
        assert ((got - expected).abs() <= bound).all()


def test_a_shared_prefix_is_read_once(kernels: ModuleType) -> None:
    lengths = [1000 + i for i in range(1, 25)]
    sequences = Sequences(kernels, Shape(), lengths, shared=800)
    rows = [(i, length - 1, 1) for i, length in enumerate(lengths)]
    own = sum(length - 800 for length in lengths)
    read = sequences.step(rows).tokens_read(0, sequences.shape.query_heads)
    assert read == 800 + own
    long = sequences.step(rows, "by_query").tokens_read(0, sequences.shape.query_heads)
    assert long == sum(lengths)


def test_not_a_number_reaches_only_those_who_see_it(kernels: ModuleType, target: str) -> None:
    sequences = Sequences(kernels, Shape(kv_dtype="fp32"), [40, 40])
    sequences.keys[0][25, 1] = torch.nan
    first, second = sequences.attend([(0, 0, 40), (1, 0, 40)], Rules())
    nan = first.isnan()
    assert nan[25:, 3:6].all()
    assert not nan[:, :3].any()
    assert not nan[:, 6:].any()
    assert not second.isnan().any()


@pytest.mark.parametrize("kv_dtype", PLAIN)
@pytest.mark.parametrize(("key_dim", "value_dim", "block_size"), [(64, 64, 16), (33, 47, 32), (80, 1, 256)])
def test_what_is_written_is_what_the_reference_writes(
    kernels: ModuleType, target: str, kv_dtype: str, key_dim: int, value_dim: int, block_size: int
) -> None:
    shape = Shape(2, 1, key_dim, value_dim, block_size, kv_dtype)
    parts = [(0, 0, 300), (1, 0, 5), (2, 0, 1)]
    native, plain = (Sequences(kernels, shape, [300, 5, 1], seed=7) for _ in range(2))
    random = torch.Generator().manual_seed(3)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 65504, 65519.9, 65520, 1e30, 3e-8, -2.9e-8, 6e-5, 1e-40])
    for x in (*native.keys, *native.values):  # numbers of every size, halves between two bfloat16 and two float16
        bits = torch.randint(-(2**31), 2**31, x.shape, generator=random).int()
        exponents = torch.randint(100, 150, x.shape, generator=random).int()
        low = torch.tensor([0x8000, 0x1000, 0x0FFF, 0x18000])[torch.randint(4, x.shape, generator=random)].int()
        x.copy_(((bits & -0x7F820000) & ~0x7F800000 | exponents << 23 | low).view(torch.float32))
        flat = x.view(-1)
        flat[: len(special)] = special[: len(flat)]
    native.write(parts)
    for number, _, count in parts:
        blocks = torch.tensor(plain.tables[number]).repeat_interleave(block_size)[:count]
        offsets = torch.arange(count) % block_size
        plain.storage.write(LAYER, blocks, offsets, native.keys[number], native.values[number])
    assert torch.equal(native.storage.data, plain.storage.data)


def test_what_does_not_fit_is_refused(kernels: ModuleType) -> None:
    sequences = Sequences(kernels, Shape(), [40])
    native = sequences.native

    def step(start: int, count: int, table: list[int]) -> object:
        arrays = [np.array([x], np.int32) for x in (start, count)]
        return kernels.Step(native, *arrays, np.array(table, np.int32), np.array([0, len(table)], np.int64), [0])

    with pytest.raises(ValueError, match="too short"):
        step(16, 1, [0])
    with pytest.raises(ValueError, match="does not exist"):
        step(16, 1, [0, sequences.storage.num_blocks])
    with pytest.raises(ValueError, match="does not exist"):
        step(16, 1, [-1, 0])
    with pytest.raises(ValueError, match="no tokens"):
        step(16, 0, [0, 1])
    good = sequences.step([(0, 0, 40)])
    query, out = torch.zeros(40, 9, 64), torch.zeros(40, 9, 64)
    with pytest.raises(ValueError, match="multiple of the KV heads"):
        good.attend(LAYER, query[:, :8].contiguous(), out[:, :8].contiguous(), 1.0)
    with pytest.raises(ValueError, match="query must be"):
        good.attend(LAYER, query[1:], out, 1.0)
    with pytest.raises(ValueError, match="side by side"):
        good.attend(LAYER, query.transpose(0, 1).contiguous().transpose(0, 1), out, 1.0)
    with pytest.raises(ValueError, match="no layer 2"):
        good.attend(2, query, out, 1.0)
    with pytest.raises(ValueError, match="sinks"):
        good.attend(LAYER, query, out, 1.0, sinks=torch.zeros(8))
    with pytest.raises(ValueError, match="block_size"):
        kernels.KVStorage(sequences.storage.data, 8, 3, 64, 64, [])
    with pytest.raises(ValueError, match="no native kernels"):
        kernels.KVStorage(sequences.storage.data, 16, 3, 64, 64, [(0, 0, 1, 1, "fp99", "bf16")])
    with pytest.raises(ValueError, match="do not fit a block"):
        kernels.KVStorage(sequences.storage.data, 16, 3, 64, 64, [(0, 12289, 2048, 2048, "bf16", "bf16")])
