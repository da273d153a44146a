"""What the native kernels reach of the machine's limits, both measured in one run, in turn.

    python benchmarks/kernels.py [--repeat N] [--json]

Linear layers, all of a model's one after the other, so that nothing is in a cache: with a few rows bytes of weights
per second against the rate of plain reading; with many rows float operations per second against torch in float32.
Every figure is the best of N.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import ModuleType

import numpy as np
import torch

from anaphora import native

FEW, MANY = (1, 2, 4, 8, 16), (32, 128, 512, 2048)


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    hidden: int
    qkv: int
    queries: int
    inner: int
    vocabulary: int

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of one layer."""
        return (
            (self.qkv, self.hidden),
            (self.hidden, self.queries),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        )


SHAPES = (
    Shape("SmolLM2-135M", 30, 576, 960, 576, 1536, 49152),
    Shape("Qwen2.5-1.5B, 6 layers", 6, 1536, 2048, 1536, 8960, 151936),
)


@dataclass(frozen=True)
class Figure:
    shape: str
    rows: int
    rate: float
    """GB/s up to 16 rows, else GFLOP/s."""
    limit: float

    @property
    def share(self) -> float:
        return self.rate / self.limit


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def best(works: list[Callable[[], object]], repeat: int) -> list[float]:
    """The shortest time of each, taken in turn."""
    times = [[seconds(work) for work in works] for _ in range(repeat)]
    return [min(column) for column in zip(*times, strict=True)]


def load() -> ModuleType:
    kernels = native.load()
    if kernels is None:
        raise SystemExit(native.missing())
    return kernels


def decoder(shape: Shape):  # type: ignore[no-untyped-def]
    """A program of the shape's linear layers; (program, bytes of weights, float operations per row)."""
    kernels = load()
    program = kernels.Program()
    hidden, attended, qkv, inner = map(program.buffer, (shape.hidden, shape.queries, shape.qkv, shape.inner))
    generator = torch.Generator().manual_seed(0)

    def weights(outputs: int, inputs: int, gated: bool = False):  # type: ignore[no-untyped-def]
        values = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
        return kernels.Weights(values.bfloat16(), gated=gated)

    few = kernels.Weights(torch.randn(256, shape.queries, generator=generator).bfloat16())
    program.embed(attended, few)
    program.embed(hidden, kernels.Weights(torch.randn(256, shape.hidden, generator=generator).bfloat16()))
    norm = torch.ones(shape.hidden)
    total = []
    for _ in range(shape.layers):
        (q, o, g, d) = (weights(*size, gated=index == 2) for index, size in enumerate(shape.linears))
        program.linear(qkv, hidden, q, norm=norm, norm_eps=1e-5)
        program.linear(hidden, attended, o, add=True)
        program.linear(inner, hidden, g, norm=norm, norm_eps=1e-5, activation="silu")
        program.linear(hidden, inner, d, add=True)
        total += [q, o, g, d]
    head = weights(shape.vocabulary, shape.hidden)
    program.logits(hidden, head, norm=norm, norm_eps=1e-5)
    return program, sum(w.nbytes for w in total), head.nbytes


def runner(program, rows: int, logits: bool, vocabulary: int) -> Callable[[], None]:  # type: ignore[no-untyped-def]
    ids = np.arange(rows, dtype=np.int64) % 256
    wanted = np.arange(rows if logits else 0, dtype=np.int32)
    out = np.empty((len(wanted), vocabulary), np.float32)
    return lambda: program.run(None, ids, ids, wanted, out)


def measure(shape: Shape, repeat: int, few: tuple[int, ...], many: tuple[int, ...]) -> list[Figure]:
    kernels = load()
    program, body, head = decoder(shape)
    memory = np.ones(1 << 28, np.uint8)
    works: list[Callable[[], object]] = [lambda: kernels.read(memory)]
    works += [runner(program, rows, True, shape.vocabulary) for rows in few]
    times = best(works, repeat)
    limit = len(memory) / times[0] / 1e9
    figures = [Figure(shape.name, r, (body + head) / t / 1e9, limit) for r, t in zip(few, times[1:], strict=True)]
    torch.set_num_threads(kernels.threads())
    for rows in many:
        x = {width: torch.randn(rows, width) for _, width in shape.linears}
        matrices = [torch.randn(size) for size in shape.linears]

        def by_torch(x: dict[int, torch.Tensor] = x, matrices: list[torch.Tensor] = matrices) -> None:
            for matrix in matrices:
                torch.nn.functional.linear(x[matrix.shape[1]], matrix)

        ours, theirs = best([runner(program, rows, False, shape.vocabulary), by_torch], max(3, repeat // 4))
        operations = 2 * rows * sum(a * b for a, b in shape.linears) / 1e9
        figures.append(Figure(shape.name, rows, operations * shape.layers / ours, operations / theirs))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shape", default="")
    options = parser.parse_args()
    figures = [f for shape in SHAPES if options.shape in shape.name for f in measure(shape, options.repeat, FEW, MANY)]
    if options.json:
        print(json.dumps([asdict(figure) | {"share": figure.share} for figure in figures], indent=1))
        return
    for f in figures:
        unit = "GB/s of" if f.rows <= FEW[-1] else "GFLOP/s; torch"
        print(f"{f.shape:24} {f.rows:5} rows {f.rate:8.1f} {unit} {f.limit:8.1f}   {f.share:6.1%}")


if __name__ == "__main__":
    main()
