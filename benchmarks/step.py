"""Where a decoding step's time goes, in microseconds: 1, 8 and 32 streams, greedy.

    python benchmarks/step.py [--model smollm2-135m] [--context 1024] [--steps 200] [--out step.json]

Host parts are what the engine does besides the model: schedule, prepare (token ids, positions, block tables), sample,
and the rest (bookkeeping, text, statistics). Medians over the steps, and the best step; nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anaphora.engine import engine as engine_module
from anaphora.engine.build import Startup, allotment, load, prepare
from anaphora.engine.config import UserConfig
from anaphora.engine.engine import Engine
from anaphora.engine.params import SamplingParams
from anaphora.engine.sources.resolve import resolve_model


class Clock:
    """Seconds spent in the watched parts since the last `take`."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, its time counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent[part] = self.spent.get(part, 0.0) + time.perf_counter() - began

        return counted

    @contextmanager
    def watching(self, owner: Any, name: str, part: str, result: str | None = None) -> Iterator[None]:
        """Count `owner.name` as `part`, and calls of what it returns as `result`. State changes: it is replaced."""
        original = getattr(owner, name)
        counted = self.timed(part, original)
        watched = counted if result is None else lambda *args: self.timed(result, counted(*args))
        setattr(owner, name, watched)
        try:
            yield
        finally:
            setattr(owner, name, original)

    def take(self) -> dict[str, float]:
        spent, self.spent = self.spent, {}
        return spent


def decode(engine: Engine, streams: int, context: int, steps: int) -> list[dict[str, float]]:
    """Seconds per part of each of `steps` steps with `streams` requests that share nothing."""
    rng = random.Random(streams)
    greedy = SamplingParams(temperature=0.0, max_tokens=steps + 8, ignore_eos=True)
    for i in range(streams):
        engine.add(str(i), [rng.randrange(1000) for _ in range(context)], greedy)
    while engine.scheduler.waiting or any(request.num_remaining > 1 for request in engine.scheduler.running):
        engine.step()
    clock, found = Clock(), []
    with (
        clock.watching(engine.scheduler, "schedule", "schedule"),
        clock.watching(engine.runner.executor, "begin", "prepare", result="model"),
        clock.watching(engine_module, "sample", "sample"),
        clock.watching(engine, "step", "step"),
    ):
        for _ in range(steps):
            engine.step()
            spent = clock.take()
            host = spent["step"] - spent["model"]
            spent["rest"] = host - spent["schedule"] - spent["prepare"] - spent["sample"]
            found.append(spent | {"host": host})
    for i in range(streams):
        engine.abort(str(i))
    engine.reset_prefix_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("step.json"))
    args = parser.parse_args()

    user = UserConfig(device="cpu", backend=args.backend, enable_prefix_caching=True)
    prepared = prepare(resolve_model(args.model), user)
    engine = load(prepared, Startup())
    parts = ("schedule", "prepare", "sample", "rest", "host", "model", "step")
    report: dict[str, Any] = {"schema_version": 1, "benchmark": "step", "settings": dict(allotment(prepared))}
    print(f"{'microseconds':>14}", *(f"{part:>16}" for part in parts))
    for streams in (1, 8, 32):
        found = decode(engine, streams, args.context, args.steps)
        figures = {}
        for part in parts:
            values = [1e6 * each[part] for each in found]
            figures[part] = {"median": statistics.median(values), "best": min(values)}
        report[f"{streams} streams"] = figures
        cells = (f"{figures[part]['median']:,.0f} ({figures[part]['best']:,.0f})" for part in parts)
        print(f"{streams:>6} streams", *(f"{cell:>16}" for cell in cells))
    args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
