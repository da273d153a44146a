"""How near the tiers come to what memory and disk give: ratios, with the limits measured in the same run.

    python benchmarks/tiers.py [--folder DIR] [--block-bytes 368640] [--trials 7] [--out tiers.json]

Plain sequential direct I/O and the tier take turns, a few blocks each, on whole pages of the same memory; so do memcpy
and the RAM tier. Plain I/O makes a call for each block, and, "at once", one for all of a turn, as the tier does where
blocks lie side by side. Ratios are those of the medians of all turns. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_digest, xxh3_128_digest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from anaphora.blocks.eviction import LRU
from anaphora.tiers.break_even import LoadSpeed
from anaphora.tiers.disk import DiskTier
from anaphora.tiers.hierarchy import Hierarchy, Tier
from anaphora.tiers.memory import page_buffer
from anaphora.tiers.ram import ENTRY_BYTES, RamTier
from anaphora.tiers.record import pack_record
from anaphora.tiers.segment import Segment, slot_bytes
from anaphora.tiers.store import BlockMeta, Outcome
from support.stored_blocks import SPACE, chain

GOALS = {
    "disk_read": 0.8,
    "disk_write": 0.8,
    "ram_load": 0.8,
    "ram_save": 0.8,
    "disk_lookup_8000_seconds": 0.010,
    "recovery_100000_seconds": 1.0,
}
"""Ratios at least, seconds at most."""
TURN, SAVED = 5, 16
"""Blocks; what the hierarchy gives a worker at once at this size, to load and to save."""
LOOKUP = 8000
RECOVERED = 100_000
EXPECTED = LoadSpeed(0.001, 5e8)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def best(call: Callable[[], object], trials: int) -> float:
    return min(seconds(call) for _ in range(trials))


def compare(limit: Sequence[float], ours: Sequence[float], nbytes: int) -> dict[str, float]:
    """Of two lists of seconds for the same bytes, taken in turn."""
    plain, tier = statistics.median(limit), statistics.median(ours)
    return {
        "limit_gb_per_second": nbytes / plain / 1e9,
        "ours_gb_per_second": nbytes / tier / 1e9,
        "ratio": plain / tier,
        "best_ratio": min(limit) / min(ours),
    }


def checksums(size: int, trials: int) -> dict[str, float]:
    """GB/s of one core, over more memory than its caches hold."""
    memory = page_buffer(64 << 20)
    memory[:] = os.urandom(1 << 20) * 64
    parts = [memory[at : at + size] for at in range(0, memory.nbytes - size, size)]
    kinds: dict[str, Callable[[Any], object]] = {
        "xxh3-128": xxh3_128_digest,
        "xxh3-64": xxh3_64_digest,
        "crc32 (zlib)": zlib.crc32,
    }
    try:
        import google_crc32c  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:  # it takes nothing but bytes: of memory of another kind it needs a copy
        kinds["crc32c (google), with the copy"] = lambda part: google_crc32c.value(bytes(part))
    total = sum(part.nbytes for part in parts)
    return {name: total / best(lambda f=f: [f(part) for part in parts], trials) / 1e9 for name, f in kinds.items()}  # type: ignore[misc]


def ram(size: int, trials: int) -> dict[str, dict[str, float]]:
    count = (256 << 20) // size // TURN * TURN
    pool, plain = page_buffer(count * size), page_buffer(count * size)
    views = [pool[i * size : (i + 1) * size] for i in range(count)]
    pool[:] = os.urandom(size) * count
    tier, blocks = RamTier(count * (size + ENTRY_BYTES), size, LRU()), chain("ram", count)
    one, two = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (pool, plain))

    def copy(into: int, data: int, turn: slice) -> None:
        for at in range(turn.start * size, turn.stop * size, size):
            ctypes.memmove(into + at, data + at, size)

    copy(two, one, slice(0, count))  # every page is there before anything is timed
    tier.save(blocks, views)
    times: dict[str, list[float]] = {name: [] for name in ("out", "save", "in", "load")}
    for _ in range(trials):
        tier.discard([block.key for block in blocks])
        for turn in turns(count):
            times["out"].append(seconds(partial(copy, two, one, turn)))
            times["save"].append(seconds(partial(tier.save, blocks[turn], views[turn])))
        for turn in turns(count):
            times["in"].append(seconds(partial(copy, one, two, turn)))
            times["load"].append(seconds(partial(tier.load, blocks[turn], views[turn])))
    assert tier.stats().hits == count * trials
    return {
        "ram_save": compare(times["out"], times["save"], TURN * size),
        "ram_load": compare(times["in"], times["load"], TURN * size),
    }


def turns(count: int, size: int = TURN) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def rotated(names: Iterable[str], by: int) -> list[str]:
    ordered = list(names)
    return ordered[by % len(ordered) :] + ordered[: by % len(ordered)]


def disk(folder: Path, size: int, trials: int) -> dict[str, dict[str, float]]:
    """One thread against one; into memory that begins in the middle of a page; and with the hierarchy's threads."""
    count = (192 << 20) // size // (TURN * SAVED) * TURN * SAVED
    memory = page_buffer(count * size)
    memory[:] = os.urandom(size) * count
    views = [memory[i * size : (i + 1) * size] for i in range(count)]
    apart = page_buffer(count * (size + 64))
    unaligned = [apart[i * (size + 64) + 64 : (i + 1) * (size + 64)] for i in range(count)]
    raw = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(raw, 0, 2 * count * size)
    tier, blocks = DiskTier(folder / "tier", 1 << 30, LRU()), chain("disk", count)
    hierarchy = Hierarchy([Tier(tier, 3, EXPECTED)])

    def write(turn: slice) -> None:
        for i in range(turn.start, turn.stop):
            os.pwrite(raw, views[i], i * size)

    def read(turn: slice) -> None:
        for i in range(turn.start, turn.stop):
            os.preadv(raw, [views[i]], i * size)

    def write_at_once(turn: slice) -> None:
        os.pwritev(raw, views[turn], (count + turn.start) * size)

    def read_at_once(turn: slice) -> None:
        os.preadv(raw, views[turn], (count + turn.start) * size)

    def save(turn: slice) -> None:
        assert set(tier.save(blocks[turn], views[turn])) == {Outcome.OK}

    def load(turn: slice) -> None:
        assert set(tier.load(blocks[turn], views[turn])) == {Outcome.OK}

    def load_unaligned(turn: slice) -> None:
        assert set(tier.load(blocks[turn], unaligned[turn])) == {Outcome.OK}

    def threads() -> None:
        found = hierarchy.load(blocks, views, [0] * count)
        hierarchy.drain(600)
        assert set(found.outcomes) == {Outcome.OK}

    for part in turns(count, SAVED):  # everything is there once before anything is timed
        write(part)
        write_at_once(part)
        save(part)
    names = ("write", "write at once", "save", "read", "read at once", "load", "unaligned", "whole", "threads")
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(trials):
        tier.discard([block.key for block in blocks])
        for i, turn in enumerate(turns(count, SAVED)):
            saving = {"write": write, "write at once": write_at_once, "save": save}
            for name in rotated(saving, i):  # who comes after whom matters to a disk
                times[name].append(seconds(partial(saving[name], turn)))
        for i, turn in enumerate(turns(count)):
            loading = {"read": read, "read at once": read_at_once, "load": load, "unaligned": load_unaligned}
            for name in rotated(loading, i):
                times[name].append(seconds(partial(loading[name], turn)))
        times["whole"].append(seconds(lambda: read(slice(0, count))))
        times["threads"].append(seconds(threads))
    hierarchy.close()
    os.close(raw)
    return {
        "disk_write": compare(times["write"], times["save"], SAVED * size),
        "disk_read": compare(times["read"], times["load"], TURN * size),
        "disk_write_at_once": compare(times["write at once"], times["save"], SAVED * size),
        "disk_read_at_once": compare(times["read at once"], times["load"], TURN * size),
        "disk_read_into_unaligned_memory": compare(times["read"], times["unaligned"], TURN * size),
        "disk_read_3_threads": compare(times["whole"], times["threads"], count * size),
    }


def index(folder: Path, trials: int) -> dict[str, float]:
    """A folder of RECOVERED committed blocks (their slots are never read): its start, and a lookup in it."""
    size = slot_bytes(16, 4096)
    per_segment = 5000
    blocks: list[BlockMeta] = [meta for name in range(RECOVERED // 100) for meta in chain(name, 100)]
    folder.mkdir(mode=0o700)
    for number in range(RECOVERED // per_segment):
        segment = Segment.create(folder / f"seg-{number + 1:08x}.kv", SPACE, size, per_segment)
        ours = range(number * per_segment, (number + 1) * per_segment)
        segment.commit(0, [pack_record(i % per_segment, blocks[i], 4096, stored_at=1, last_used=i) for i in ours])
        segment.close()
    starts: list[float] = []
    busy: list[float] = []
    for _ in range(trials):
        begin, used = time.perf_counter(), time.thread_time()
        tier = DiskTier(folder, 2 << 30, LRU())
        starts.append(time.perf_counter() - begin)
        busy.append(time.thread_time() - used)
        keys = [block.key for block in blocks[:: RECOVERED // LOOKUP][:LOOKUP]]
        hierarchy = Hierarchy([Tier(tier, 1, EXPECTED)])
        lookup = best(lambda keys=keys, tier=tier: tier.contains(keys), 5)  # type: ignore[misc]
        whole = best(lambda keys=keys, hierarchy=hierarchy: hierarchy.lookup(keys), 5)  # type: ignore[misc]
        assert all(tier.contains(keys))
        hierarchy.close()
    return {
        "recovery_100000_seconds": min(starts),
        "recovery_100000_cpu_seconds": min(busy),
        "disk_lookup_8000_seconds": lookup,
        "hierarchy_lookup_8000_seconds": whole,
    }


def unmet(report: dict[str, Any]) -> list[str]:
    lines = []
    for name, goal in GOALS.items():
        found = report["index"][name] if name.endswith("seconds") else report["ratios"][name]["ratio"]
        if found > goal if name.endswith("seconds") else found < goal:
            lines.append(f"{name}: {found:.4f}, the goal is {goal}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--block-bytes", type=int, default=368_640, help="a multiple of 4096")
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        report: dict[str, Any] = {
            "machine": platform.platform(),
            "load": os.getloadavg(),
            "block_bytes": options.block_bytes,
            "checksums_gb_per_second": checksums(options.block_bytes, options.trials),
            "ratios": {
                **ram(options.block_bytes, options.trials),
                **disk(folder, options.block_bytes, options.trials),
            },
            "index": index(folder / "index", min(options.trials, 3)),
        }
    finally:
        shutil.rmtree(folder)
    report["unmet"] = unmet(report)
    text = json.dumps(report, indent=2)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    sys.exit(bool(report["unmet"]))


if __name__ == "__main__":
    main()
