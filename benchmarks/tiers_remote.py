"""How fast blocks move through the remote tier, against the same store's bare client, in one run.

    python -m benchmarks.tiers_remote [--bytes 64MiB] [--repeats 7]      from the checkout, with the extra dev

The bare client moves values of the same sizes in the same batches: Valkey's by pipelines of SET and GET, Mooncake's by
batch_put_from and batch_get_into in registered memory. The tier's figures hold all it does: header, checksum, and
checking every byte that comes back. `read` is one call of the tier, `load` a load as the server does it, by the
hierarchy's workers. They take turns; a ratio is of medians. Exit 1 when one misses the goal.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from anaphora.tiers.build import TierConfig, open_hierarchy
from anaphora.tiers.memory import page_buffer
from anaphora.tiers.remote.registry import open_remote
from anaphora.tiers.remote.url import size as parse_size
from anaphora.tiers.store import BlockMeta, Outcome, Space
from anaphora.types import BlockHash
from support.remote import mooncake, valkey, why_no_mooncake

BLOCK_SIZES = {
    "SmolLM2-135M, 16 tokens": 368_640,
    "Llama-3.1-8B, 16 tokens": 2 << 20,
    "Llama-3.1-70B, 16 tokens": 5 << 20,
}
GOAL = 0.8
SPACE = Space(b"benchmarkbenchma", "benchmark", "bf16/1")


@dataclass
class Bare:
    """A store's own client: moves `count` values between the store and its own memory."""

    write: Callable[[list[str]], None]
    read: Callable[[list[str]], None]
    delete: Callable[[list[str]], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--bytes", type=parse_size, default=64 << 20, help="moved by one batch (default 64MiB)")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    rows = []
    for store, opened in (("valkey", _valkey), ("mooncake", _mooncake)):
        if store == "mooncake" and (why := why_no_mooncake()):
            print(why, file=sys.stderr)
            continue
        for what, size in BLOCK_SIZES.items():
            with opened(size, arguments.bytes // size) as (bare, url):
                rows.append({"store": store, "block": what, **_compare(bare, url, size, arguments)})
                print(json.dumps(rows[-1]), flush=True)
    return int(any(min(row[f"{move}_ratio"] for move in ("write", "read", "load")) < GOAL for row in rows))


def _compare(bare: Bare, url: str, size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    count = arguments.bytes // size
    source, target = page_buffer(count * size), page_buffer(count * size)
    source[:] = os.urandom(count * size)
    target[:] = bytes(count * size)  # touched, as the pool's memory is
    sources, targets = [[memory[i * size : (i + 1) * size] for i in range(count)] for memory in (source, target)]
    seconds: dict[str, list[float]] = {name: [] for name in ("bare_write", "bare_read", "write", "read", "load")}
    loaded = threading.Event()
    hierarchy = open_hierarchy(TierConfig(remote_url=url), size, 16, pool=source, on_ready=loaded.set)
    tier = hierarchy.tiers[0].store

    def load(blocks: list[BlockMeta]) -> None:
        loaded.clear()
        under_way = hierarchy.load(blocks, targets, [0] * count)
        while not under_way.done:
            loaded.wait()
        hierarchy.poll()
        if under_way.ready() != count:
            raise SystemExit(f"the server could not: {set(under_way.outcomes)}")

    for repeat in range(arguments.repeats + 1):
        names = [f"bare-{repeat}-{i}" for i in range(count)]
        blocks = [_block(repeat, i) for i in range(count)]
        turns: list[tuple[str, Callable[[], None]]] = [
            ("bare_write", partial(bare.write, names)),
            ("write", lambda blocks=blocks: _all_ok(tier.save(blocks, sources))),  # type: ignore[misc]
            ("bare_read", partial(bare.read, names)),
            ("read", lambda blocks=blocks: _all_ok(tier.load(blocks, targets))),  # type: ignore[misc]
            ("load", partial(load, blocks)),
        ]
        if repeat % 2:  # whoever goes second finds other memory in the store, so they take turns
            turns = [turns[1], turns[0], *turns[:1:-1]]
        for name, move in turns:
            start = time.perf_counter()
            move()
            seconds[name].append(time.perf_counter() - start)
            if name in ("read", "load"):
                if target != source:
                    raise SystemExit("other bytes came back than went out")
                target[:] = bytes(count * size)
        bare.delete(names)
        tier.discard([block.key for block in blocks])
    hierarchy.close()
    middle = {name: median(values[1:]) for name, values in seconds.items()}  # the first round warms up
    rates = {f"{name}_gb_s": round(count * size / value / 1e9, 3) for name, value in middle.items()}
    return {
        **rates,
        "write_ratio": round(middle["bare_write"] / middle["write"], 2),
        "read_ratio": round(middle["bare_read"] / middle["read"], 2),
        "load_ratio": round(middle["bare_read"] / middle["load"], 2),
    }


@contextmanager
def _valkey(size: int, count: int) -> Iterator[tuple[Bare, str]]:
    with valkey(maxmemory="1gb") as server:
        client = server.client()
        values = [memoryview(os.urandom(size)) for _ in range(count)]

        def write(names: list[str]) -> None:
            pipeline = client.pipeline(transaction=False)
            for name, value in zip(names, values, strict=True):
                pipeline.set(name, value)
            pipeline.execute()

        def read(names: list[str]) -> None:
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.get(name)
            pipeline.execute()

        yield Bare(write, read, lambda names: client.delete(*names)), f"valkey://127.0.0.1:{server.port}?timeout=30"


@contextmanager
def _mooncake(size: int, count: int) -> Iterator[tuple[Bare, str]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(mooncake(folder, 768 << 20))
        url = f"mooncake://{cluster.address}?timeout=30"
        open_remote(url).close()  # sets what the environment should say, for both

        from mooncake.store import MooncakeDistributedStore

        client = MooncakeDistributedStore()
        if client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", cluster.address) != 0:
            raise SystemExit("Mooncake's client does not find the master")
        stack.callback(client.close)
        memory = page_buffer(size * count)
        memory[:] = os.urandom(size * count)
        start = _address(memory)
        client.register_buffer(start, memory.nbytes)
        addresses, sizes = [start + i * size for i in range(count)], [size] * count

        def write(names: list[str]) -> None:
            if set(client.batch_put_from(names, addresses, sizes)) != {0}:
                raise SystemExit("the bare client could not write")

        def read(names: list[str]) -> None:
            if set(client.batch_get_into(names, addresses, sizes)) != {size}:
                raise SystemExit("the bare client could not read")

        yield Bare(write, read, lambda names: client.batch_remove(names, True)), url


def _address(memory: memoryview) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _block(repeat: int, index: int) -> BlockMeta:
    key = BlockHash(struct.pack("<QQ", repeat, index))
    return BlockMeta(key, key, struct.pack("<16I", *range(16)), index, SPACE)


def _all_ok(outcomes: list[Outcome]) -> None:
    if set(outcomes) != {Outcome.OK}:
        raise SystemExit(f"the tier could not: {set(outcomes)}")


if __name__ == "__main__":
    sys.exit(main())
