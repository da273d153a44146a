"""Hit rates of every eviction policy, and what a replay costs (compare within one run, not across).

    python benchmarks/replay.py [--trace FILE] [--requests N] [--parts trace,made-up,speed] [--out FILE.json]

Tables: policies x pool sizes x traces (a Mooncake trace, whole and in halves, and the made-up ones), with the
optimum of perfect foresight, and LRU that is told of every block whether it is used again, but not when. Speeds, in CPU
seconds, best of three: the LRU curve and libcachesim's LRU (where it is installed) over the same block references; the
pool under every policy; the whole command at one size; a policy's own bookkeeping per block touched.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anaphora.blocks.eviction import POLICIES, EvictionPolicy, PriorityPolicy, make_policy
from anaphora.blocks.pool import Block
from anaphora.replay.lru_curve import LRUCurve, lru_curve
from anaphora.replay.optimum import next_uses, optimum
from anaphora.replay.readers.base import ReadReport, TraceRequest
from anaphora.replay.readers.mooncake import read_mooncake
from anaphora.replay.simulator import PoolReplay
from anaphora.replay.synthetic import GENERATORS
from anaphora.types import BlockHash

Trace = list[TraceRequest]
SIZES = (1000, 5000, 10000, 30000)
SMALL_SIZES = (300, 1000, 3000, 10000)


@dataclass(eq=False, slots=True)
class Entry:
    """A cached block as a policy sees it, without a pool."""

    hash: BlockHash
    depth: int
    last_used: int = 0


class Recorder(EvictionPolicy[Block]):
    """Passes every event on and writes it down, so that the policy's part can be timed alone."""

    def __init__(self, policy: EvictionPolicy[Block]) -> None:
        self._policy = policy
        self._entries: dict[Block, Entry] = {}
        self.events: list[tuple[str, Entry | None, Any]] = []

    def _note(self, event: str, entry: Block) -> None:
        self.events.append((event, self._entries[entry], entry.last_used))

    def insert(self, entry: Block, parent: Block | None) -> None:
        self._entries[entry] = Entry(entry.hash, entry.depth)
        self.events.append(("insert", self._entries[entry], self._entries[parent] if parent else None))
        self._policy.insert(entry, parent)

    def hit(self, entry: Block) -> None:
        self._note("hit", entry)
        self._policy.hit(entry)

    def add(self, entry: Block) -> None:
        self._note("add", entry)
        self._policy.add(entry)

    def remove(self, entry: Block) -> None:
        self._note("remove", entry)
        self._policy.remove(entry)

    def pop(self) -> Block:
        self.events.append(("pop", None, None))
        return self._policy.pop()

    def __len__(self) -> int:
        return len(self._policy)


class Told(PriorityPolicy[Block]):
    """LRU that is told which blocks are ever used again: those that are not go first."""

    def __init__(self, prompts: Sequence[Sequence[BlockHash]]) -> None:
        super().__init__()
        self._left = Counter(name for names in prompts for name in names)
        """Uses that are still to come."""

    def insert(self, entry: Block, parent: Block | None) -> None:
        self.hit(entry)

    def hit(self, entry: Block) -> None:
        self._left[entry.hash] -= 1

    def priority(self, entry: Block) -> tuple[float, ...]:
        return self._left[entry.hash] > 0, entry.last_used


def main() -> None:
    args = _arguments()
    result: dict[str, Any] = {"hit_rates": {}}
    traces = _traces(args.trace, args.requests)
    for name, trace in traces.items():
        real = name.startswith("trace")
        if ("trace" if real else "made-up") in args.parts:
            result["hit_rates"][name] = _hit_rates(name, trace, SIZES if real else SMALL_SIZES)
    if "speed" in args.parts:
        name, trace = next(iter(traces.items()))
        result["speed"] = _speeds(name, trace)
        result["bookkeeping_microseconds"] = _bookkeeping(trace)
        if args.trace is not None:
            result["command_seconds"] = _command(args.trace)
    if args.out:
        args.out.write_text(json.dumps(result, indent=2))


def _traces(path: Path | None, requests: int) -> dict[str, Trace]:
    traces: dict[str, Trace] = {}
    if path is not None:
        with path.open(encoding="utf-8") as source:
            whole = list(read_mooncake(source, ReadReport()))
        half = len(whole) // 2
        traces = {"trace": whole, "trace, first half": whole[:half], "trace, second half": whole[half:]}
    return traces | {name: list(make(requests, 1)) for name, make in GENERATORS.items()}


def _hit_rates(name: str, trace: Trace, sizes: Sequence[int]) -> dict[str, dict[int, float]]:
    """Per cent of block references, by policy and pool size; printed as a table."""
    curve = lru_curve(trace)
    prompts = [request.hash_ids or () for request in trace]
    names = [request.blocks(512) for request in trace]
    uses = next_uses(prompts)
    # One size beyond what the trace holds shows the ceiling.
    shown = [size for i, size in enumerate(sizes) if not i or curve.hits(sizes[i - 1])[0] < curve.ceiling[0]]
    print(f"\n{name}: {curve.blocks} block references, ceiling {_percent(curve.ceiling[0], curve):.2f}")
    print("".join(f"{text!s:>11}" for text in ("blocks", *shown)))
    rows: dict[str, dict[int, float]] = {}
    for policy in (*POLICIES, "told who", "optimum"):
        rows[policy] = {}
        for size in shown:
            if policy == "optimum":
                hits = optimum(prompts, size, uses)
            else:
                cache = PoolReplay(size, Told(names) if policy == "told who" else make_policy(policy))
                hits = sum(cache.request(blocks)[0] for blocks in names)
            rows[policy][size] = round(_percent(hits, curve), 2)
        print(f"{policy:>11}" + "".join(f"{rate:>11.2f}" for rate in rows[policy].values()), flush=True)
    return rows


def _percent(hits: int, curve: LRUCurve) -> float:
    return 100 * hits / max(1, curve.blocks)


def _speeds(name: str, trace: Trace, size: int = 5000) -> dict[str, float]:
    """Block references per CPU second."""
    names = [request.blocks(512) for request in trace]
    references = sum(map(len, names))
    print(f"\n{name}, {references} block references, pool of {size}: million references per CPU second")
    speeds = {"LRU curve, every size": references / _best(lambda: lru_curve(trace))}
    speeds[f"LRU curve up to {size}"] = references / _best(lambda: lru_curve(trace, size))
    if (seconds := _libcachesim(trace, size)) is not None:
        speeds["libcachesim LRU, one size"] = references / seconds

    def run(policy: EvictionPolicy[Block]) -> None:
        cache = PoolReplay(size, policy)
        for blocks in names:
            cache.request(blocks)

    for policy in POLICIES:
        speeds[f"pool, {policy}"] = references / _best(lambda policy=policy: run(make_policy(policy)))  # type: ignore[misc]
    for label, speed in speeds.items():
        print(f"{label:>26} {speed / 1e6:8.2f}")
    return speeds


def _bookkeeping(trace: Trace, size: int = 5000) -> dict[str, float]:
    """Microseconds of a policy's own work per block touched, by policy."""
    names = [request.blocks(512) for request in trace]
    references = sum(map(len, names))
    found = {}
    print(
        f"\nmicroseconds of a policy's own work per block touched, pool of {size} (insert or hit, and all that follows)"
    )
    for policy in POLICIES:
        recorder = Recorder(make_policy(policy))
        cache = PoolReplay(size, recorder)
        for blocks in names:
            cache.request(blocks)
        gc.collect()
        gc.freeze()  # a million recorded events, which no server has, are not to be searched for garbage
        micros = _best(lambda policy=policy, recorder=recorder: _bookkeep(policy, recorder)) / references * 1e6  # type: ignore[misc]
        gc.unfreeze()
        found[policy] = micros
        print(f"{policy:>26} {micros:8.2f}", flush=True)
    return found


def _command(path: Path, size: int = 5000, rounds: int = 3) -> dict[str, float]:
    """CPU seconds of `anaphora replay` at one size, start and reading included."""
    found = {}
    for policy in ("lru", "hazard"):
        command = [sys.executable, "-m", "anaphora", "replay", str(path), "--bounded", "--sizes", str(size)]
        times = []
        for _ in range(rounds):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([*command, "--policy", policy, "--jobs", "1"], check=True, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        found[policy] = min(times)
        print(f"anaphora replay --bounded --sizes {size} --policy {policy}: {found[policy]:.2f} CPU seconds")
    return found


def _bookkeep(name: str, recorder: Recorder) -> None:
    policy: EvictionPolicy[Any] = make_policy(name)
    insert, hit, add, remove, pop = policy.insert, policy.hit, policy.add, policy.remove, policy.pop
    for event, entry, more in recorder.events:
        if event == "insert":
            insert(entry, more)
        elif event == "hit":
            hit(entry)
        elif event == "pop":
            pop()
        elif event == "add":
            assert entry is not None
            entry.last_used = more
            add(entry)
        else:
            remove(entry)


def _libcachesim(trace: Trace, size: int) -> float | None:
    try:
        import libcachesim  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        print("libcachesim is not installed: pip install libcachesim to compare")
        return None
    requests = []
    for request in trace:
        for block in reversed(request.hash_ids or ()):
            item = libcachesim.Request()
            item.obj_id, item.obj_size = block + 1, 1
            requests.append(item)

    def run() -> None:
        cache = libcachesim.LRU(cache_size=size)
        for item in requests:
            cache.get(item)

    return _best(run)


def _best(work: Callable[[], object], rounds: int = 3) -> float:
    """CPU seconds of the quickest of some rounds."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, help="Mooncake JSONL")
    parser.add_argument("--requests", type=int, default=6000, help="of every made-up trace")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["trace", "made-up", "speed"])
    parser.add_argument("--out", type=Path, help="also as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
