"""What this machine allows: read bandwidth and matrix product rate, and from them the limit of each workload.

A step reads the weights and every key and value once (a shared prefix once for all), and computes linear layers and
causal attention; it cannot be quicker than the slower of the two (roofline, Williams et al. 2009).
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.workload import Workload

BF16 = 2
"""Bytes of a weight, a key or a value: the limit is that of the model as it comes."""
GEMM_ROWS = 1024
PASSES = 5


@dataclass(frozen=True, slots=True)
class Geometry:
    """A gated dense decoder, from its config.json."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> Geometry:
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of a layer's products: q k v, attention output, gate and up, down."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            (self.hidden, q + 2 * kv),
            (q, self.hidden),
            (self.hidden, 2 * self.intermediate),
            (self.intermediate, self.hidden),
        ]

    @property
    def layer_weights(self) -> int:
        """Numbers in all layers' matrices."""
        return self.layers * sum(n * m for n, m in self.linears)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def step_weight_bytes(self) -> int:
        """Read by each step: the layers and the output head (of the embedding only a few rows)."""
        return BF16 * (self.layer_weights + self.head_weights)

    @property
    def kv_bytes(self) -> int:
        """Per token."""
        return 2 * BF16 * self.layers * self.kv_heads * self.head_dim

    def attention_flops(self, contexts: int) -> int:
        """Of queries that see `contexts` keys in all."""
        return 4 * self.layers * self.heads * self.head_dim * contexts


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes per second read by all threads; FLOP per second of the best dtype."""

    bandwidth: float
    gemm: float

    def of(self, workload: Workload, geometry: Geometry) -> float | None:
        """The best value that this machine allows, in the workload's unit; None where there is no such bound."""
        shared, own, streams = workload.shared, workload.own, workload.streams
        if workload.kind == "decode":
            grown = own + workload.new / 2
            kv = geometry.kv_bytes * (shared + streams * grown)
            flops = 2 * streams * (geometry.layer_weights + geometry.head_weights)
            flops += geometry.attention_flops(int(streams * (shared + grown)))
            return streams / self._seconds(geometry.step_weight_bytes + kv, flops)
        if workload.kind == "start":
            return None
        # Prompt tokens are computed together; only the last one goes through the output head.
        seen = own * shared + own * (own + 1) // 2
        flops = 2 * own * geometry.layer_weights + 2 * geometry.head_weights + geometry.attention_flops(seen)
        seconds = self._seconds(geometry.step_weight_bytes + geometry.kv_bytes * (shared + own), flops)
        return own / seconds if workload.kind == "prefill" else seconds

    def _seconds(self, read: float, flops: float) -> float:
        return max(read / self.bandwidth, flops / self.gemm)


class Meter:
    """Measures the limits again in every turn, between the engines. `close` deletes what it compiled."""

    def __init__(self, geometry: Geometry, threads: int) -> None:
        self.threads = threads
        self.geometry = geometry
        self.folder = tempfile.TemporaryDirectory()
        self.bandwidths: list[float] = []
        self.gemms: dict[str, list[float]] = {"float32": [], "bfloat16": []}
        program = Path(self.folder.name) / "read_bandwidth"
        source = Path(__file__).with_name("read_bandwidth.c")
        command = ["cc", "-O3", "-march=native", "-pthread", str(source), "-o", str(program)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            self.program: Path | None = program
        except (OSError, subprocess.SubprocessError):
            self.program = None

    @property
    def method(self) -> str:
        return "a C program's sum" if self.program else "torch.sum, for want of a C compiler"

    def measure(self) -> None:
        """One more sample of each rate."""
        torch.set_num_threads(self.threads)
        self.bandwidths.append(self._bandwidth())
        for name, rates in self.gemms.items():
            rates.append(self._gemm(getattr(torch, name)))

    def close(self) -> None:
        self.folder.cleanup()

    def _bandwidth(self) -> float:
        if self.program:
            command = [str(self.program), str(self.threads), str(PASSES)]
            return float(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
        data = torch.ones(1 << 27)
        return data.nbytes / min(_seconds(data.sum) for _ in range(PASSES))

    def _gemm(self, dtype: torch.dtype) -> float:
        """FLOP per second over one layer's products."""
        flops = seconds = 0.0
        for inputs, outputs in self.geometry.linears:
            x = torch.randn(GEMM_ROWS, inputs).to(dtype)
            weight = torch.randn(outputs, inputs).to(dtype)
            product = partial(torch.nn.functional.linear, x, weight)
            seconds += min(_seconds(product) for _ in range(3))
            flops += 2 * GEMM_ROWS * inputs * outputs
        return flops / seconds


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
