"""Attention of the native kernels over a real storage, and its float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anaphora.geometry.kv_dtype import kv_dtype
from anaphora.geometry.layout import CacheGroup, CacheLayout
from anaphora.storage.codec import Codec
from anaphora.storage.formats.base import Format
from anaphora.storage.paged import PagedStorage
from support.native_programs import EPS

PLAIN = ("bf16", "fp16", "fp32")
SCALED = ("fp8_e4m3", "int4", "int8", "k8v4")
APART = ("bf16+int4", "int4+fp16", "fp8_e4m3+int8", "fp32+fp8_e4m3")
"""Keys' and values' formats."""


@dataclass(frozen=True)
class Shape:
    kv_heads: int = 3
    per_head: int = 3
    """Query heads of a KV head."""
    key_dim: int = 64
    value_dim: int = 64
    block_size: int = 16
    kv_dtype: str = "bf16"
    """A name, or one of keys and one of values with a + between."""
    window: int | None = None

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.per_head

    @property
    def layout(self) -> CacheLayout:
        """Two layers in one slot each; the second is what is tested."""
        group = CacheGroup(self.window, (0, 1))
        return CacheLayout((group,), 2, self.kv_heads, self.key_dim, self.value_dim, self.block_size)

    @property
    def codec(self) -> Codec:
        name, _, values = self.kv_dtype.partition("+")
        return Codec(kv_dtype(name, value=values or None), self.layout)


@dataclass(frozen=True)
class Rules:
    scale: float = 0.125
    softcap: float = 0.0
    alibi: Tensor | None = None
    sinks: Tensor | None = None


Part = tuple[int, int, int]
"""(sequence, start, count): tokens that a step computes."""

LAYER = 1


def native_storage(kernels: ModuleType, storage: PagedStorage) -> Any:
    """Nothing is turned: what the tests give is what is stored."""
    layout = storage.layout
    layers = []
    for layer in sorted(layer for group in layout.groups for layer in group.layers):
        codec = storage.codec.layer(layer)
        place = (layout.place(layer)[0], codec.offset, codec.key_bytes, codec.value_bytes)
        layers.append((*place, codec.key.size.name, codec.value.size.name))
    shape = (layout.block_size, layout.kv_heads, layout.key_dim, layout.value_dim)
    return kernels.KVStorage(storage.data, *shape, layers)


class Sequences:
    """Sequences of random keys, values and queries, and the blocks they will take, in random order.

    The first `shared` tokens, whole blocks, are the same of all, and in the same blocks. What is not written is NaN.
    """

    def __init__(
        self, kernels: ModuleType, shape: Shape, lengths: Sequence[int], *, shared: int = 0, seed: int = 0
    ) -> None:
        self.kernels, self.shape = kernels, shape
        random = torch.Generator().manual_seed(seed)

        def numbers(tokens: int, heads: int, dim: int) -> Tensor:
            return torch.randn(tokens, heads, dim, generator=random)

        def stored(dim: int) -> list[Tensor]:
            head = numbers(shared, shape.kv_heads, dim)
            return [torch.cat((head, numbers(length - shared, shape.kv_heads, dim))) for length in lengths]

        self.keys, self.values = stored(shape.key_dim), stored(shape.value_dim)
        self.queries = [numbers(length, shape.query_heads, shape.key_dim) for length in lengths]
        blocks_of = [-(-length // shape.block_size) for length in lengths]
        common = shared // shape.block_size
        total = common + sum(blocks - common for blocks in blocks_of)
        free = torch.randperm(total + 2, generator=random).tolist()
        head, free = free[:common], free[common:]
        self.tables: list[list[int]] = []
        for blocks in blocks_of:
            self.tables.append(head + free[: blocks - common])
            free = free[blocks - common :]
        self.storage = PagedStorage(shape.codec, total + 2, torch.device("cpu"))
        self.storage.data.fill_(0xFF)
        self.native = native_storage(kernels, self.storage)

    def step(self, parts: Sequence[Part], strategy: str = "chosen") -> Any:
        """Tables as short as the parts need them, and -1 before a window."""
        size, window = self.shape.block_size, self.shape.window
        tables = []
        for number, start, count in parts:
            table = self.tables[number][: -(-(start + count) // size)]
            passed = 0 if window is None else max(0, start - window + 1) // size
            tables.append([-1] * passed + table[passed:])
        return self.kernels.Step(
            self.native,
            np.array([start for _, start, _ in parts], np.int32),
            np.array([count for *_, count in parts], np.int32),
            np.array([block for table in tables for block in table], np.int32),
            np.cumsum([0, *map(len, tables)]).astype(np.int64),
            [window or 0],
            strategy,
        )

    def write(self, parts: Sequence[Part], strategy: str = "chosen") -> Any:
        step = self.step(parts, strategy)
        step.write_kv(LAYER, self._along(self.keys, parts), self._along(self.values, parts))
        return step

    def attend(self, parts: Sequence[Part], rules: Rules, strategy: str = "chosen") -> list[Tensor]:
        """One step: writes the parts, then what their queries get, by part. The tensors are those of a wider row."""
        step = self.write(parts, strategy)
        query = self._along(self.queries, parts)
        wide = torch.cat((query.flatten(1), torch.full((len(query), 5), torch.nan)), dim=1)
        query = wide[:, :-5].view(query.shape)
        out = torch.full((*query.shape[:2], self.shape.value_dim), torch.nan)
        step.attend(LAYER, query, out, rules.scale, rules.softcap, rules.alibi, rules.sinks)
        return list(torch.split(out, [count for *_, count in parts]))

    def reference(self, part: Part, rules: Rules) -> tuple[Tensor, Tensor]:
        """(what float64 gives, how far float32 may be off), [count, query_heads, value_dim]."""
        number, start, count = part
        end, heads = start + count, self.shape.per_head
        query = self.queries[number][start:end].double()
        codec = self.storage.codec.layer(LAYER)
        key, value = (
            _kept(form, x[number][:end]).double().repeat_interleave(heads, dim=1)
            for form, x in ((codec.key, self.keys), (codec.value, self.values))
        )
        scores = torch.einsum("qhd,khd->hqk", query, key) * rules.scale
        sizes = key.abs()
        if codec.key.size.wide:  # what all codes are off by is made up for per query
            sizes += 2 * sizes.amax(-1, keepdim=True)
        size = torch.einsum("qhd,khd->hqk", query.abs(), sizes) * rules.scale
        if rules.softcap:
            scores = rules.softcap * torch.tanh(scores / rules.softcap)
        distance = torch.arange(end) - torch.arange(start, end)[:, None]
        if rules.alibi is not None:
            scores += rules.alibi.double()[:, None, None] * distance
            size += rules.alibi.double()[:, None, None] * distance.abs()
        hidden = distance > 0
        if self.shape.window is not None:
            hidden |= distance <= -self.shape.window
        scores.masked_fill_(hidden, -torch.inf)
        size.masked_fill_(hidden, 0)
        sink = torch.full((len(scores), count, 1), -torch.inf, dtype=torch.float64)
        if rules.sinks is not None:
            sink[:] = rules.sinks.double()[:, None, None]
        weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        mixed = torch.einsum("hqk,khd->qhd", weights, value)
        # A weight is off by what its score is off (a chain of key_dim roundings, like a random walk, of at most the
        # largest sum of sizes), and by a few roundings of its own; a mixed value by that, and by its own chain.
        roundings = self.shape.key_dim**0.5 * size.amax(-1).T[..., None] + 2 * end**0.5 + 16
        bound = EPS * roundings * torch.einsum("hqk,khd->qhd", weights, value.abs())
        return mixed, bound + 1e-30

    def _along(self, tensors: Sequence[Tensor], parts: Sequence[Part]) -> Tensor:
        return torch.cat([tensors[number][start : start + count] for number, start, count in parts])


def _kept(form: Format, x: Tensor) -> Tensor:
    """What a format gives back of x [T, heads, dim]."""
    return form.decode(*form.encode(x.flatten(0, 1)), x.shape[2]).view(x.shape)
