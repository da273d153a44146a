from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anaphora.engine.attention import _MAX_SCORES, TorchAttention
from anaphora.engine.batch import Batch, BatchRow
from anaphora.geometry.layout import CacheGroup, CacheLayout
from anaphora.types import NULL_BLOCK, RequestId
from support.storage import make_storage


@dataclass
class Sequence:
    """What one sequence would feed its attention, and how many tokens are computed so far."""

    query: Tensor
    key: Tensor
    value: Tensor
    tables: list[list[int]]
    done: int = 0


@dataclass(frozen=True)
class Case:
    layout: CacheLayout
    lengths: tuple[int, ...]
    heads_per_kv: int
    softcap: float | None
    alibi: bool
    sinks: bool
    poison: float
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    windows: list[int | None] = [None]
    if draw(st.booleans()):
        windows.append(draw(st.integers(1, 12)))
    layout = CacheLayout(
        groups=tuple(CacheGroup(window, (2 * i, 2 * i + 1)) for i, window in enumerate(windows)),
        slots=2,
        kv_heads=draw(st.integers(1, 3)),
        key_dim=draw(st.sampled_from([4, 8])),
        value_dim=draw(st.sampled_from([4, 8])),
        block_size=draw(st.sampled_from([1, 2, 4, 16])),
    )
    return Case(
        layout=layout,
        lengths=tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))),
        heads_per_kv=draw(st.sampled_from([1, 2, 3])),
        softcap=draw(st.sampled_from([None, 2.0])),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        poison=draw(st.sampled_from([1e30, math.nan, math.inf])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def naive(
    sequence: Sequence,
    window: int | None,
    scale: float,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """The whole sequence at once in float64, one [length, length] matrix per head: [length, heads, value_dim]."""
    heads = sequence.query.shape[1]
    position = torch.arange(len(sequence.query))
    distance = position[None, :] - position[:, None]
    seen = (distance <= 0) & (distance > -(window or 10**9))
    out = []
    for h in range(heads):
        kv_head = h // (heads // sequence.key.shape[1])
        scores = sequence.query[:, h].double() @ sequence.key[:, kv_head].double().T * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            scores = scores + alibi_slopes[h].double() * distance
        weights = scores.exp() * seen
        total = weights.sum(1, keepdim=True) + (sinks[h].double().exp() if sinks is not None else 0.0)
        out.append(weights / total @ sequence.value[:, kv_head].double())
    return torch.stack(out, dim=1)


def next_row(sequence: Sequence, count: int, layout: CacheLayout) -> BatchRow:
    """A row for the next `count` tokens; blocks that a window has passed are gone from the tables."""
    end = sequence.done + count
    tables = []
    for group, table in zip(layout.groups, sequence.tables, strict=True):
        passed = 0 if group.window is None else max(0, sequence.done - group.window + 1) // layout.block_size
        used = table[: -(-end // layout.block_size)]
        tables.append(tuple(NULL_BLOCK if i < passed else block for i, block in enumerate(used)))
    return BatchRow(RequestId("r"), (0,) * count, sequence.done, tuple(tables), sample=True)


@settings(max_examples=80, deadline=None)
@given(cases())
def test_equals_naive_float64(case: Case) -> None:
    """Random lengths, chunks, shuffled blocks and poisoned memory: every token's result is the naive one."""
    layout = case.layout
    random = Random(case.seed)
    torch.manual_seed(case.seed)
    heads = layout.kv_heads * case.heads_per_kv
    needed = [-(-length // layout.block_size) for length in case.lengths]
    free = list(range(len(layout.groups) * sum(needed) + 3))
    random.shuffle(free)
    sequences = [
        Sequence(
            query=torch.randn(length, heads, layout.key_dim),
            key=torch.randn(length, layout.kv_heads, layout.key_dim),
            value=torch.randn(length, layout.kv_heads, layout.value_dim),
            tables=[[free.pop() for _ in range(blocks)] for _ in layout.groups],
        )
        for length, blocks in zip(case.lengths, needed, strict=True)
    ]
    storage = make_storage(layout, len(layout.groups) * sum(needed) + 3)
    storage.data.view(torch.float32).fill_(case.poison)
    slopes = torch.rand(heads) if case.alibi else None
    sinks = torch.randn(heads) if case.sinks else None
    scale = layout.key_dim**-0.5
    backend = TorchAttention(storage)
    layer_of_group = [group.layers[random.randrange(2)] for group in layout.groups]
    expected = [
        [naive(sequence, group.window, scale, case.softcap, slopes, sinks) for sequence in sequences]
        for group in layout.groups
    ]

    while any(sequence.done < len(sequence.query) for sequence in sequences):
        taken = []
        for index, sequence in enumerate(sequences):
            left = len(sequence.query) - sequence.done
            count = min(left, random.choice([0, 1, 1, 2, 3, 7, 40]))
            if count:
                taken.append((index, sequence, count))
        if not taken:
            continue
        random.shuffle(taken)
        attend = backend.begin(Batch(tuple(next_row(s, count, layout) for _, s, count in taken)))
        spans = [slice(sequence.done, sequence.done + count) for _, sequence, count in taken]
        for group, layer in enumerate(layer_of_group):
            out = attend(
                layer,
                *(
                    torch.cat([getattr(s, name)[span] for (_, s, _), span in zip(taken, spans, strict=True)])
                    for name in ("query", "key", "value")
                ),
                scale=scale,
                softcap=case.softcap,
                alibi_slopes=slopes,
                sinks=sinks,
            )
            wanted = torch.cat([expected[group][i][span] for (i, _, _), span in zip(taken, spans, strict=True)])
            torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
        for _, sequence, count in taken:
            sequence.done += count


def test_other_layers_and_blocks_stay_untouched() -> None:
    layout = CacheLayout((CacheGroup(None, (0, 1, 2)),), 3, kv_heads=2, key_dim=4, value_dim=6, block_size=4)
    storage = make_storage(layout, 5)
    row = BatchRow(RequestId("r"), (0, 0, 0), 3, ((4, 2),), sample=True)  # positions 3, 4, 5
    storage.data.view(torch.float32).fill_(7.0)
    key, value = torch.randn(3, 2, 4), torch.randn(3, 2, 6)
    TorchAttention(storage).begin(Batch((row,)))(1, torch.randn(3, 4, 4), key, value, scale=1.0)
    blocks = torch.arange(5)
    for stored, new in zip(storage.read(1, blocks[:, None]), (key, value), strict=True):
        torch.testing.assert_close(stored[4, :, 3], new[0])
        torch.testing.assert_close(stored[2, :, :2], new[1:].transpose(0, 1))
    sevens = torch.full((4,), 4), torch.full((4,), 2)
    for blocks, offsets in ((sevens[0], torch.arange(4)), (sevens[1], torch.arange(4))):
        storage.write(1, blocks, offsets, torch.full((4, 2, 4), 7.0), torch.full((4, 2, 6), 7.0))
    assert bool((storage.data.view(torch.float32) == 7.0).all())


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_result_of_a_row_does_not_depend_on_the_other_rows(softcap: float | None) -> None:
    """Lengths far apart and near: one bucket, several buckets, alone."""
    layout = CacheLayout((CacheGroup(None, (0,)),), 1, kv_heads=2, key_dim=8, value_dim=8, block_size=4)
    storage = make_storage(layout, 400)
    torch.manual_seed(0)
    storage.data.view(torch.float32).normal_()
    rows = []
    first = 0
    for start in (0, 3, 90, 97, 100, 399):
        blocks = start // 4 + 1
        rows.append(BatchRow(RequestId(str(start)), (0,), start, (tuple(range(first, first + blocks)),), sample=True))
        first += blocks
    query, key, value = torch.randn(len(rows), 4, 8), torch.randn(len(rows), 2, 8), torch.randn(len(rows), 2, 8)
    backend = TorchAttention(storage)
    together = backend.begin(Batch(tuple(rows)))(0, query, key, value, scale=0.5, softcap=softcap)
    for i, row in enumerate(rows):
        one = slice(i, i + 1)
        alone = backend.begin(Batch((row,)))(0, query[one], key[one], value[one], scale=0.5, softcap=softcap)
        torch.testing.assert_close(together[one], alone, rtol=1e-5, atol=1e-6)


def test_tiles_of_queries_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are made a tile of 7 queries at a time, with the same result."""
    layout = CacheLayout((CacheGroup(9, (0,)),), 1, kv_heads=1, key_dim=4, value_dim=4, block_size=8)
    storage = make_storage(layout, 8)
    torch.manual_seed(0)
    query, key, value = torch.randn(50, 2, 4), torch.randn(50, 1, 4), torch.randn(50, 1, 4)
    row = BatchRow(RequestId("r"), (0,) * 50, 0, (tuple(range(7)),), sample=True)
    whole = TorchAttention(storage).begin(Batch((row,)))(0, query, key, value, scale=0.5, softcap=5.0)
    monkeypatch.setitem(_MAX_SCORES, "cpu", 2 * 50 * 7)
    tiled = TorchAttention(storage).begin(Batch((row,)))(0, query, key, value, scale=0.5, softcap=5.0)
    torch.testing.assert_close(tiled, whole, rtol=1e-6, atol=1e-6)
