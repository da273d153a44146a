"""Attention over paged keys and values: the interface, and the reference backend in plain torch.

A backend's `begin(batch)` does what all layers share (slot mapping, tables, masks) once, and returns the
step's `attend`. There are no globals: a decoder gets `attend` as an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from anaphora.engine.batch import Batch, BatchRow
from anaphora.storage.paged import PagedStorage

_MAX_SCORES = {"cpu": 1 << 19}
_MAX_SCORES_ELSEWHERE = 1 << 26
"""Most scores made at a time: on a CPU what its caches hold, elsewhere what bounds the memory (256 MiB)."""

_MAX_GATHERED = 1 << 24
"""Most elements of keys that decode rows gather together."""

_SIMILAR = 0.75
"""Decode rows share a padded gather when the shorter's blocks are at least this share of the longest's."""


class Attend(Protocol):
    """One step's attention, called once per layer, layers in any order."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write the step's keys and values to their slots, then attend causally over each row's whole context.

        query [T, query_heads, key_dim], key [T, kv_heads, key_dim], value [T, kv_heads, value_dim], all of one
        dtype, positional encoding applied, tokens in the order of the batch's rows; -> [T, query_heads, value_dim].
        Query head h reads KV head h // (query_heads // kv_heads). The layer's window is that of its cache group:
        a query at position p sees keys at p - window + 1 .. p.

            score = softcap * tanh(query . key * scale / softcap)      (without softcap: query . key * scale)
            score += alibi_slopes[head] * (key position - query position)
            weight = exp(score) / (exp(sinks[head]) + sum exp(score))  (without sinks: plain softmax)

        alibi_slopes and sinks: [query_heads]. State changes: the storage.
        """
        ...


class AttentionBackend(Protocol):
    """Makes a step's `attend`."""

    def begin(self, batch: Batch) -> Attend:
        """Prepare everything the layers share. The result is valid for this one batch."""
        ...


class TorchAttention:
    """The reference backend: any device, every step spelled out, softmax in float32."""

    def __init__(self, storage: PagedStorage) -> None:
        self._storage = storage

    def begin(self, batch: Batch) -> Attend:
        return _Step(self._storage, batch)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Consecutive queries of a span, and the keys that any of them sees."""

    queries: slice
    keys: slice
    mask: Tensor
    """[B, queries, keys] float32, to be added: 0 where a query sees a key, else -inf."""


@dataclass(frozen=True)
class _Span:
    """Rows that attend together: B rows of n queries each over L gathered tokens (B = 1 or n = 1)."""

    tokens: Tensor
    """[B * n] where the queries lie along T."""
    blocks: Tensor
    """[B, blocks]"""
    gathered: slice
    """The L tokens of the blocks that are wanted; all of them when n = 1."""
    query_positions: Tensor
    """[B, n]"""
    key_positions: Tensor
    """[B, L]; beyond a row's length they go on past every query's position."""
    window: int | None
    _tiles: dict[int, list[_Tile]] = field(default_factory=dict)

    def tiles(self, size: int) -> list[_Tile]:
        """The queries cut into tiles of `size`; made once, used by every layer."""
        if size not in self._tiles:
            n = self.query_positions.shape[1]
            self._tiles[size] = [self._tile(begin, min(n, begin + size)) for begin in range(0, n, size)]
        return self._tiles[size]

    def _tile(self, begin: int, end: int) -> _Tile:
        n, length = self.query_positions.shape[1], self.key_positions.shape[1]
        keys = slice(0, length)
        if n > 1:  # a row of its own: its last query is the last key
            first = 0 if self.window is None else max(0, length - n + begin - self.window + 1)
            keys = slice(first, length - n + end)
        distance = self.query_positions[:, begin:end, None] - self.key_positions[:, None, keys]
        hidden = distance < 0
        if self.window is not None:
            hidden |= distance >= self.window
        mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return _Tile(slice(begin, end), keys, mask)

    @cached_property
    def unseen(self) -> tuple[Tensor, Tensor] | None:
        """(row, token) of gathered tokens that are padding or stale; a row of its own has none."""
        if self.query_positions.shape[1] > 1:
            return None
        rows, tokens = self.tiles(1)[0].mask[:, 0].nonzero(as_tuple=True)
        return (rows, tokens) if len(rows) else None


class _Place(NamedTuple):
    """A row in the step."""

    row: BatchRow
    begin: int
    """Where its tokens begin along T."""
    first: int
    """Position of the first key that its first query sees."""


class _Step:
    """One batch's `attend`."""

    def __init__(self, storage: PagedStorage, batch: Batch) -> None:
        self.storage = storage
        self.batch = batch
        self._groups = [
            (*self._slots(index), list(self._spans(index, group.window)))
            for index, group in enumerate(storage.layout.groups)
        ]

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        codec, dtype = self.storage.codec.layer(layer), query.dtype
        query, key, value = codec.before(query, key, value)
        blocks, offsets, spans = self._groups[self.storage.layout.place(layer)[0]]
        self.storage.write(layer, blocks, offsets, key, value)
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        for span in spans:
            b, n = span.query_positions.shape
            keys, values = (
                stored[:, :, span.gathered].to(query.dtype) for stored in self.storage.read(layer, span.blocks)
            )
            if span.unseen is not None:  # neither a mask nor a weight of 0 silences a stale NaN
                rows, tokens = span.unseen
                keys[rows, :, tokens] = 0
                values[rows, :, tokens] = 0
            queries = query.index_select(0, span.tokens).view(b, n, *query.shape[1:])
            result = _attention(span, queries, keys, values, scale, softcap, alibi_slopes, sinks)
            out.index_copy_(0, span.tokens, result.flatten(0, 1))
        return codec.after(out).to(dtype)

    def _tensor(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.storage.device)

    def _slots(self, group: int) -> tuple[Tensor, Tensor]:
        """(block, token within it), each [T]: where the step's tokens are kept."""
        size = self.storage.layout.block_size
        positions = self.batch.positions
        tables = (row.block_tables[group] for row in self.batch.rows for _ in row.token_ids)
        blocks = [table[position // size] for table, position in zip(tables, positions, strict=True)]
        return self._tensor(blocks), self._tensor(positions) % size

    def _spans(self, group: int, window: int | None) -> Iterator[_Span]:
        """Rows of several queries one by one, rows of a single query in buckets of similar length."""
        begin = 0
        single: list[_Place] = []
        for row in self.batch.rows:
            place = _Place(row, begin, 0 if window is None else max(0, row.start - window + 1))
            begin += len(row.token_ids)
            if len(row.token_ids) == 1:
                single.append(place)
            else:
                yield self._span([place], group, window)

        size = self.storage.layout.block_size
        per_block = self.storage.layout.kv_heads * size * self.storage.layout.key_dim
        bucket: list[_Place] = []
        longest = 0
        for place in sorted(single, key=lambda place: place.first - place.row.start):  # longest context first
            blocks = place.row.start // size - place.first // size + 1
            room = (len(bucket) + 1) * longest * per_block <= _MAX_GATHERED
            if bucket and (blocks < _SIMILAR * longest - 1 or not room):
                yield self._span(bucket, group, window)
                bucket = []
            longest = blocks if not bucket else max(longest, blocks)
            bucket.append(place)
        if bucket:
            yield self._span(bucket, group, window)

    def _span(self, places: Sequence[_Place], group: int, window: int | None) -> _Span:
        """Rows of one query each, whose gather is padded to the longest, or one row, whose gather is cut to fit."""
        size = self.storage.layout.block_size
        n = len(places[0].row.token_ids)
        tables = [p.row.block_tables[group][p.first // size : (p.row.start + n - 1) // size + 1] for p in places]
        width = max(map(len, tables))
        blocks = self._tensor([[*table, *[table[-1]] * (width - len(table))] for table in tables])
        bases = [p.first // size * size for p in places]
        gathered = slice(0, width * size)
        if n > 1:
            gathered = slice(places[0].first - bases[0], places[0].row.start + n - bases[0])
        begins = self._tensor([p.begin for p in places])
        starts = self._tensor([p.row.start for p in places])
        counts = torch.arange(n, device=blocks.device)
        offsets = torch.arange(gathered.start, gathered.stop, device=blocks.device)
        return _Span(
            tokens=(begins[:, None] + counts).flatten(),
            blocks=blocks,
            gathered=gathered,
            query_positions=starts[:, None] + counts,
            key_positions=self._tensor(bases)[:, None] + offsets,
            window=window,
        )


def _attention(
    span: _Span,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [B, n, Hq, D], keys [B, Hkv, L, D], values [B, Hkv, L, Dv] -> [B, n, Hq, Dv], tile by tile."""
    b, n, heads, _ = query.shape
    kv_heads, length = keys.shape[1:3]
    per_head = (1, kv_heads, heads // kv_heads, 1, 1)
    # [B, Hkv, heads per KV head, n, D]
    grouped = query.view(b, n, kv_heads, heads // kv_heads, -1).permute(0, 2, 3, 1, 4)
    out = query.new_empty(b, n, kv_heads, heads // kv_heads, values.shape[-1])
    most = _MAX_SCORES.get(query.device.type, _MAX_SCORES_ELSEWHERE)
    for tile in span.tiles(max(1, most // (heads * length)) if n > 1 else 1):
        part = grouped[:, :, :, tile.queries]
        shape = (*part.shape[:4], tile.mask.shape[-1])
        scores = (part.flatten(2, 3) @ keys[:, :, tile.keys].transpose(2, 3)).float().view(shape)
        bias, factor = tile.mask[:, None, None], scale
        if alibi_slopes is not None:
            distance = span.key_positions[:, None, tile.keys] - span.query_positions[:, tile.queries, None]
            bias = bias + alibi_slopes.float().view(per_head) * distance[:, None, None]
        if softcap is not None:
            scores, factor = torch.tanh(scores * (scale / softcap)), softcap
        scores = torch.add(bias, scores, alpha=factor)
        if sinks is not None:
            sink = sinks.float().view(per_head).expand(*shape[:4], 1)
            weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        mixed = weights.to(query.dtype).flatten(2, 3) @ values[:, :, tile.keys]
        out[:, tile.queries] = mixed.view(*shape[:4], -1).permute(0, 3, 1, 2, 4)
    return out.flatten(2, 3)
