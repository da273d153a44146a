"""Time to first token of a long prefix by where it comes from, and what tiers cost when they hit nothing.

    python benchmarks/tiers_serve.py [--model smollm2-135m] [--tokens 4096] [--rounds 3] [--folder DIR] [--out FILE]
        [--remote]

One engine at a time, in this process. A round: a prefix of its own, computed (cold), asked for again (pool), and again
by a new engine over the same folder (disk after a restart); what reading the same bytes takes is measured beside it.
With --remote also by engines that find it in a Valkey and in a Mooncake of this machine, where another stored it.
Then engines with and without tiers take turns at prompts that nobody has seen: time to first token, and decode steps.
Ratios are those of medians. Nothing else should run meanwhile. Exit status 1: a goal was missed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from anaphora.engine.build import Startup, load, prepare
from anaphora.engine.config import UserConfig
from anaphora.engine.engine import Engine
from anaphora.engine.params import RequestOutput, SamplingParams
from anaphora.engine.sources.resolve import resolve_model

GOALS = {
    "disk TTFT / (pool TTFT + bare read)": ("<=", 1.3),
    "cold TTFT / disk TTFT": (">=", 15.0),
    "TTFT with tiers and no hit / without": ("<=", 1.05),
    "decode step with tiers and no hit / without": ("<=", 1.03),
}
TURNS, UNSEEN, DECODED = 24, 128, 64
"""With and without tiers: so many prompts that nothing is hit of, their tokens, those of their answers. Many short
ones, because the speed of a shared machine's cores drifts by more than what is looked for."""


@dataclass(frozen=True)
class Timed:
    """One request alone."""

    ttft: float
    steps: list[float]
    """Seconds between two tokens."""
    last: RequestOutput


def run(engine: Engine, prompt: list[int], new_tokens: int = 1) -> Timed:
    """As the server's loop does: while there is nothing to compute it sleeps until the tiers ring."""
    news = threading.Event()
    if engine.tiers is not None:
        engine.tiers.bell.listener = news.set
    began = time.perf_counter()
    engine.add("timed", prompt, SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True))
    times: list[float] = []
    outputs: list[RequestOutput] = []
    while engine.has_work:
        news.clear()
        outputs += engine.step()
        times += [time.perf_counter() - began] * (len(outputs) - len(times))
        if engine.has_work and (patience := engine.patience()) != 0:
            news.wait(patience)
    gaps = [b - a for a, b in pairwise(times)]
    return Timed(times[0], gaps, outputs[-1])


def prompt_of(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 20000), k=tokens)


def bare_read(folder: Path, nbytes: int) -> float:
    """Seconds to read so many bytes of the cache's own files, in order, past the page cache."""
    flags, step, done = os.O_RDONLY | getattr(os, "O_DIRECT", 0), 4 << 20, 0
    buffer = mmap.mmap(-1, step)
    began = time.perf_counter()
    for path in sorted(folder.rglob("seg-*")):
        handle = os.open(path, flags)
        try:
            offset = 0
            while done < nbytes and (got := os.preadv(handle, [buffer], offset)) > 0:
                offset, done = offset + got, done + got
        finally:
            os.close(handle)
    return time.perf_counter() - began


def remote_stores(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and URL of one store after the other; each runs while it is the turn's."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.remote import mooncake, valkey

    with valkey(maxmemory="1gb") as server:
        yield "valkey", f"valkey://127.0.0.1:{server.port}"
    with mooncake(folder, 512 << 20) as cluster:
        yield "mooncake", f"mooncake://{cluster.address}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: a temporary one")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--remote", action="store_true", help="from shared stores too; needs the extra dev")
    chosen = parser.parse_args()
    source = resolve_model(chosen.model)
    length = chosen.tokens + DECODED + 1

    def engine_of(disk: Path | None, remote: str | None = None) -> Engine:
        cache = f"{disk}:4GiB" if disk else None
        user = UserConfig(max_model_len=length, kv_memory=512 << 20, disk_cache=cache, remote_cache=remote)
        return load(prepare(source, user), Startup())

    def remote_ttfts(url: str) -> Iterator[float]:
        prompt = prompt_of(99, chosen.tokens)
        first = engine_of(None, url)
        run(first, prompt)
        assert first.tiers is not None
        assert first.tiers.wait(60)
        first.close()
        for _ in range(chosen.rounds):
            engine = engine_of(None, url)
            warm = run(engine, prompt)
            engine.close()
            assert warm.last.sources is not None
            print(f"{url} gave {warm.last.sources.remote.tokens} of {chosen.tokens} tokens", flush=True)
            yield warm.ttft

    names = ("cold", "pool", "disk", "bare", "off", "on", "off step", "on step")
    found: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as made:
        for i in range(chosen.rounds):
            folder, prompt = Path(made) / f"round-{i}", prompt_of(i, chosen.tokens)
            engine = engine_of(folder)
            found["cold"].append(run(engine, prompt).ttft)
            assert engine.tiers is not None
            assert engine.tiers.wait(60)
            found["pool"].append(run(engine, prompt).ttft)
            nbytes = chosen.tokens // 16 * engine.config.block_bytes
            engine.close()
            found["bare"].append(bare_read(folder, nbytes))
            engine = engine_of(folder)
            warm = run(engine, prompt)
            assert warm.last.sources is not None
            print(f"round {i}: disk gave {warm.last.sources.disk.tokens} of {chosen.tokens} tokens", flush=True)
            found["disk"].append(warm.ttft)
            found["bare"].append(bare_read(folder, nbytes))  # before and after: the disk may remember
            engine.close()
            print(*(f"{name} {found[name][-1]:.3f} s" for name in names[:4]), sep=", ", flush=True)
        for store, url in remote_stores(Path(made)) if chosen.remote else ():
            found[store] = list(remote_ttfts(url))
        plain, tiered = engine_of(None), engine_of(Path(made) / "none")
        for i in range(TURNS):
            turn = [("off", plain), ("on", tiered)]
            for name, engine in turn if i % 2 else reversed(turn):
                timed = run(engine, prompt_of(1000 + i, UNSEEN), DECODED)
                found[name].append(timed.ttft)
                found[f"{name} step"] += timed.steps
        tiered.close()
    middle = {name: statistics.median(values) for name, values in found.items()}
    ratios = dict(
        zip(
            GOALS,
            (
                middle["disk"] / (middle["pool"] + middle["bare"]),
                middle["cold"] / middle["disk"],
                middle["on"] / middle["off"],
                middle["on step"] / middle["off step"],
            ),
            strict=True,
        )
    )
    for name, seconds in middle.items():
        print(f"{name:>10}  {seconds:.4f} s")
    met: dict[str, bool] = {}
    for name, ratio in ratios.items():
        sign, goal = GOALS[name]
        met[name] = ratio <= goal if sign == "<=" else ratio >= goal
        print(f"{name}: {ratio:.3f} (goal {sign} {goal}) {'met' if met[name] else 'MISSED'}")
    if chosen.out:
        chosen.out.write_text(json.dumps({"seconds": found, "ratios": ratios, "met": met}, indent=2))
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
