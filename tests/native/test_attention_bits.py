"""A query's result depends on the query and on its context alone: the same bits however the work is cut."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from support.attention_cases import Part, Rules, Sequences, Shape

SHAPES = [
    Shape(),
    Shape(2, 5, 80, 48, 32, "fp32"),
    Shape(1, 16, 96, 112, 64, "fp16", window=270),
    Shape(2, 1, 33, 35, 16, "bf16", window=20),
    Shape(kv_dtype="int8"),
    Shape(2, 5, 80, 48, 32, "fp8_e4m3", window=270),
    Shape(kv_dtype="int4"),
    Shape(2, 7, 128, 112, 64, "int4"),
    Shape(1, 2, 96, 16, 16, "k8v4", window=20),
]
shapes = pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: f"{shape.kv_dtype}-{shape.per_head}-{shape.key_dim}"
)


def rules_of(shape: Shape) -> Rules:
    random = torch.Generator().manual_seed(9)
    return Rules(shape.key_dim**-0.5, sinks=torch.randn(shape.query_heads, generator=random))


def in_chunks(sequences: Sequences, length: int, chunk: int, strategy: str = "chosen") -> Tensor:
    steps: list[list[Part]] = [[(0, at, min(chunk, length - at))] for at in range(0, length, chunk)]
    return torch.cat([sequences.attend(parts, rules_of(sequences.shape), strategy)[0] for parts in steps])


@shapes
def test_chunks_and_strategies_change_no_bit(kernels: ModuleType, target: str, shape: Shape) -> None:
    whole = in_chunks(Sequences(kernels, shape, [600]), 600, 600, "by_query")
    assert not whole.isnan().any()
    for chunk, strategy in ((7, "chosen"), (64, "by_partition"), (64, "by_query"), (512, "by_partition")):
        assert torch.equal(in_chunks(Sequences(kernels, shape, [600]), 600, chunk, strategy), whole)
    one_by_one = Sequences(kernels, shape, [600])
    one_by_one.write([(0, 0, 500)])
    for at in range(500, 600, 9):
        one_by_one.write([(0, 500, at + 1 - 500)])
        for strategy in ("by_partition", "by_query"):
            (last,) = one_by_one.attend([(0, at, 1)], rules_of(shape), strategy)
            assert torch.equal(last[0], whole[at])


@shapes
def test_a_batch_of_32_changes_no_bit(kernels: ModuleType, target: str, shape: Shape) -> None:
    lengths = [(37 * i * i + 5 * i) % 640 + 1 for i in range(32)]
    sequences = Sequences(kernels, shape, lengths)
    parts = [(i, length - n, n) for i, length in enumerate(lengths) for n in (min(length, 1 + 40 * (i % 5 == 0)),)]
    sequences.write([(i, 0, start) for i, start, _ in parts if start])
    together = sequences.attend(parts, rules_of(shape))
    for part, result in zip(parts, together, strict=True):
        (alone,) = sequences.attend([part], rules_of(shape))
        assert torch.equal(alone, result)


@shapes
def test_sharing_changes_no_bit(kernels: ModuleType, target: str, shape: Shape) -> None:
    lengths = [410 + 13 * i for i in range(20)]
    sequences = Sequences(kernels, shape, lengths, shared=320)
    sequences.write([(0, 0, 320)])
    sequences.write([(i, 320, length - 321) for i, length in enumerate(lengths)])
    parts = [(i, length - 1, 1) for i, length in enumerate(lengths)]
    together = sequences.attend(parts, rules_of(shape), "by_partition")
    for part, result in zip(parts, together, strict=True):
        (alone,) = sequences.attend([part], rules_of(shape), "by_query")
        assert torch.equal(alone, result)


@pytest.mark.parametrize("strategy", ["chosen", "by_partition", "by_query"])
def test_threads_change_no_bit(kernels: ModuleType, target: str, strategy: str) -> None:
    parts = [(0, 0, 70), (1, 500, 1), (2, 30, 1), (3, 255, 2)]
    results, before = [], kernels.threads()
    try:
        for threads in (1, 2, 3):
            kernels.set_threads(threads)
            sequences = Sequences(kernels, Shape(), [70, 501, 31, 257])
            sequences.write([(number, 0, start) for number, start, _ in parts if start])
            results.append(torch.cat(sequences.attend(parts, Rules(), strategy)))
    finally:
        kernels.set_threads(before)
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_more_records_than_are_kept_at_a_time(kernels: ModuleType) -> None:
    """They are folded in waves; 8 MiB hold less than the three partitions of 3,000 heads of 80 x 256 values."""
    shape = Shape(2, 16, 32, 256, 64)
    lengths = [520 + i for i in range(120)]
    sequences = Sequences(kernels, shape, lengths, shared=512)
    sequences.write([(0, 0, 512)])
    sequences.write([(i, 512, length - 513) for i, length in enumerate(lengths) if length > 513])
    parts = [(i, length - 1, 1) for i, length in enumerate(lengths)]
    waves = torch.cat(sequences.attend(parts, rules_of(shape), "by_partition"))
    assert torch.equal(waves, torch.cat(sequences.attend(parts, rules_of(shape), "by_query")))
