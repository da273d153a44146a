"""What native attention reaches of the machine's limits, both measured in one run, in turn.

    python benchmarks/kernels_attention.py [--repeat N] [--only WORDS] [--kv-dtypes NAMES] [--json]

Over real storages whose blocks lie in random order, many layers one after the other, so that a decode step finds
nothing in a cache. Decode: bytes of keys and values (shared ones once) per second against the rate of plain reading.
Prefill and shared prefixes: float operations per second (of the scores that are seen, and of the mixing) against
torch's float32 matrix product. Every figure is the best of N. `plan` is what a step costs before the first layer,
`write` what a layer's new keys and values cost. Several stored forms take turns, queries and outputs transformed as
when serving; `beside` is the median time of the first over that of each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np
import torch

from anaphora import native
from anaphora.engine.native_attention import kv_storage
from anaphora.geometry.layout import CacheGroup, CacheLayout
from anaphora.storage.codec import codec_for
from anaphora.storage.paged import PagedStorage

_TOO_LARGE_TO_CACHE = 96 << 20
"""Bytes that one round over the layers reads, at least."""


@dataclass(frozen=True)
class Case:
    name: str
    rows: tuple[tuple[int, int], ...]
    """(start, tokens of the step)"""
    shared: int = 0
    kv_heads: int = 3
    per_head: int = 3
    dim: int = 64

    @property
    def stored(self) -> int:
        """Tokens, shared ones once."""
        return self.shared + sum(start + count - self.shared for start, count in self.rows)

    @property
    def flops(self) -> int:
        seen = sum(start * count + count * (count + 1) // 2 for start, count in self.rows)
        return 4 * self.dim * self.kv_heads * self.per_head * seen


def decode(streams: int, context: int, shared: int = 0) -> Case:
    own = f"{context}" if not shared else f"{shared} shared + {context - shared}"
    return Case(f"decode {streams} x {own}", ((context - 1, 1),) * streams, shared)


CASES = (
    decode(1, 128),
    decode(1, 4096),
    decode(8, 1024),
    decode(8, 2048),
    decode(32, 128),
    decode(32, 4160, 4096),
    decode(32, 4256, 4192),
    decode(64, 7232, 7168),
    Case("prefill 512 at 0", ((0, 512),)),
    Case("prefill 512 at 2048", ((2048, 512),)),
    Case("prefill 512 at 4096", ((4096, 512),)),
    Case("warm 8 at 4096", ((4096, 8),)),
    Case("warm 64 at 4096", ((4096, 64),)),
    Case("decode 8 x 1024, head_dim 128, GQA 7", ((1023, 1),) * 8, kv_heads=4, per_head=7, dim=128),
    Case("prefill 512 at 2048, head_dim 128", ((2048, 512),), kv_heads=2, per_head=4, dim=128),
)


class Run:
    """A case with its storage, query and step."""

    def __init__(self, kernels: ModuleType, case: Case, kv_dtype: str) -> None:
        self.case, self.kernels, self.kv_dtype = case, kernels, kv_dtype
        one = CacheLayout((CacheGroup(None, (0,)),), 1, case.kv_heads, case.dim, case.dim, 16)
        self.bytes = case.stored * codec_for(kv_dtype, one).bytes_per_token
        layers = min(32, -(-_TOO_LARGE_TO_CACHE // self.bytes))
        layout = CacheLayout((CacheGroup(None, tuple(range(layers))),), layers, case.kv_heads, case.dim, case.dim, 16)
        common = case.shared // 16
        blocks = [-(-(start + count) // 16) - common for start, count in case.rows]
        order = np.random.default_rng(0).permutation(common + sum(blocks)).astype(np.int32)
        self.storage = PagedStorage(codec_for(kv_dtype, layout), len(order), torch.device("cpu"))
        own = np.split(order[common:], np.cumsum(blocks)[:-1])
        self.tables = [np.concatenate((order[:common], table)) for table in own]
        self.native = kv_storage(kernels, self.storage)
        self.layers, self.layer = layers, 0
        self._fill()
        tokens = sum(count for _, count in case.rows)
        self.query = torch.randn(tokens, case.kv_heads * case.per_head, case.dim)
        self.new = torch.randn(2, tokens, case.kv_heads, case.dim)
        self.out = torch.empty_like(self.query)
        self.step = self.plan()

    def _fill(self) -> None:
        every = np.unique(np.concatenate(self.tables))
        tokens = 16 * len(every)
        step = self._step(np.array([0], np.int32), np.array([tokens], np.int32), [every])
        keys, values = torch.randn(2, tokens, self.case.kv_heads, self.case.dim).unbind()
        for layer in range(self.layers):
            step.write_kv(layer, keys, values)

    def _step(self, starts: np.ndarray, counts: np.ndarray, tables: list[np.ndarray]) -> Any:
        offsets = np.cumsum([0, *map(len, tables)]).astype(np.int64)
        return self.kernels.Step(self.native, starts, counts, np.concatenate(tables), offsets, [0])

    def plan(self) -> Any:
        starts, counts = (np.array(column, np.int32) for column in zip(*self.case.rows, strict=True))
        step = self._step(starts, counts, self.tables)
        step.tokens_read(0, self.query.shape[1])
        return step

    def write(self) -> None:
        self.step.write_kv(self.layer, *self.new)

    def attend(self) -> None:
        self.step.attend(self.layer, self.query, self.out, self.case.dim**-0.5)
        self.layer = (self.layer + 1) % self.layers


@dataclass(frozen=True)
class Times:
    """Seconds."""

    attend: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    plan: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    case: Case
    kv_dtype: str
    bytes: int
    times: Times
    first: float
    """Median seconds of the first form's attention."""


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=10, help="rounds (default 10)")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--kv-dtypes", default="bf16", help="stored forms, separated by commas (default bf16)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    kernels = native.load()
    if kernels is None:
        raise SystemExit(native.missing())
    torch.set_num_threads(kernels.threads())
    names = options.kv_dtypes.split(",")
    memory = np.ones(256 << 20, np.uint8)
    square = torch.randn(1024, 1024)
    reading, product = [], []
    measured: list[Measured] = []
    for case in (case for case in CASES if options.only in case.name):
        runs = [(Run(kernels, case, name), Times()) for name in names]
        for _ in range(options.repeat):
            reading.append(seconds(lambda: kernels.read(memory)))
            product.append(min(seconds(lambda: square @ square) for _ in range(3)))
            for _ in range(8):
                for run, times in runs:
                    times.attend.append(seconds(run.attend))
            for run, times in runs:
                times.write.append(seconds(run.write))
                times.plan.append(seconds(run.plan))
        first = median(runs[0][1].attend)
        measured += [Measured(case, run.kv_dtype, run.bytes, times, first) for run, times in runs]
    bandwidth, gemm = memory.nbytes / min(reading), 2 * 1024**3 / min(product)
    figures = [
        {
            "case": each.case.name,
            "kv_dtype": each.kv_dtype,
            "microseconds": round(min(each.times.attend) * 1e6, 1),
            "plan_microseconds": round(min(each.times.plan) * 1e6, 1),
            "write_microseconds": round(min(each.times.write) * 1e6, 1),
            "of_bandwidth": round(each.bytes / min(each.times.attend) / bandwidth, 3),
            "of_gemm": round(each.case.flops / min(each.times.attend) / gemm, 3),
            "beside_first": round(each.first / median(each.times.attend), 2),
        }
        for each in measured
    ]
    result = {
        "schema_version": 2,
        "target": kernels.target(),
        "threads": kernels.threads(),
        "bandwidth_gb_s": round(bandwidth / 1e9, 2),
        "gemm_gflop_s": round(gemm / 1e9, 1),
        "figures": figures,
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(
        f"{result['target']}, {result['threads']} threads: "
        f"read {result['bandwidth_gb_s']} GB/s, product {result['gemm_gflop_s']} GFLOP/s"
    )
    print(f"{'':38}{'':9}{'us':>9}{'plan us':>9}{'write us':>10}{'of read':>9}{'of gemm':>9}{'beside':>8}")
    for row in figures:
        print(
            f"{row['case']:38}{row['kv_dtype']:9}{row['microseconds']:>9}{row['plan_microseconds']:>9}"
            f"{row['write_microseconds']:>10}{row['of_bandwidth']:>9.0%}{row['of_gemm']:>9.0%}{row['beside_first']:>8}"
        )


if __name__ == "__main__":
    main()
