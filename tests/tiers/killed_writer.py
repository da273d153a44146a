"""Kill a writing process at random moments and see what is left; run by test_disk_kill.py as a program.

    python killed_writer.py FOLDER ROUNDS SEED LIMIT

Every round forks a process that opens the folder and stores blocks from two threads, writing each block's number
into a pipe once the tier says it is stored; kills it with SIGKILL after a random time; then opens the folder and
loads everything. Prints one JSON object: rounds, blocks acknowledged, and what was wrong, which should be nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import signal
import struct
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from anaphora.blocks.eviction import LRU
from anaphora.tiers.disk import DiskTier
from anaphora.tiers.store import BlockMeta, Outcome
from support.stored_blocks import chain, payload, room

THREADS = 2
TOGETHER = 3
"""Blocks of one save."""
IN_FLIGHT = 4 * THREADS * TOGETHER
"""Blocks whose order of storing and acknowledging is open."""


ROOM_FOR_ALL = 1 << 26


def size_of(number: int) -> int:
    return 4096 * 2 if number % 2 else 5000


def block(number: int) -> BlockMeta:
    return chain(number, 1)[0]


def write(folder: Path, limit: int, first: int, pipe: int) -> None:
    """Never returns by itself."""
    tier, begun = DiskTier(folder, limit, LRU()), itertools.count()

    def store(start: int) -> None:
        for first in range(start, 1 << 30, THREADS * TOGETHER):
            numbers = range(first, first + THREADS * TOGETHER, THREADS)
            metas, turns = [block(number) for number in numbers], [next(begun) for _ in numbers]
            outcomes = tier.save(metas, [payload(meta, size_of(n)) for meta, n in zip(metas, numbers, strict=True)])
            for number, turn, outcome in zip(numbers, turns, outcomes, strict=True):
                if outcome is Outcome.OK:
                    os.write(pipe, struct.pack("<II", turn, number))

    for start in range(first, first + THREADS):
        threading.Thread(target=store, args=(start,)).start()
    threading.Event().wait()


def killed(folder: Path, limit: int, first: int, seconds: float, *, after_first: bool) -> list[int]:
    """Numbers that were acknowledged before the writer died, `seconds` after its start or its first number."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        write(folder, limit, first, writer)
    os.close(writer)
    if after_first:
        select.select([reader], [], [], 10.0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raw = b""
    while part := os.read(reader, 1 << 16):
        raw += part
    os.close(reader)
    # In the order in which their saving began: an acknowledgement may come long after it.
    return [number for _, number in sorted(struct.iter_unpack("<II", raw[: len(raw) // 8 * 8]))]


def wrongs(folder: Path, limit: int, acknowledged: list[int]) -> list[str]:
    """What is wrong with the folder, given all numbers ever acknowledged, in order."""
    found: list[str] = []
    size = sum(file.stat().st_size for file in folder.iterdir())
    if size > limit:
        found.append(f"{size} bytes, {limit} are allowed")
    tier = DiskTier(folder, limit, LRU())
    under_way = range(max(acknowledged) + 1, max(acknowledged) + 2 * IN_FLIGHT) if acknowledged else ()
    here = [number for number in acknowledged if tier.contains([block(number).key])[0]]
    for number in [*here, *(number for number in under_way if tier.contains([block(number).key])[0])]:
        into = room(1, size_of(number))
        outcome = tier.load([block(number)], into)[0]
        if outcome is not Outcome.OK:
            found.append(f"block {number}: {outcome}")
        elif into[0] != payload(block(number), size_of(number)):
            found.append(f"block {number}: wrong bytes served")
    # The oldest go first, so of those acknowledged the last ones must be here, all but those in flight.
    certain = len(acknowledged) if limit >= ROOM_FOR_ALL else max(0, len(here) - IN_FLIGHT)
    expected = acknowledged[len(acknowledged) - certain :]
    found += [f"block {number} was acknowledged and is gone" for number in set(expected) - set(here)]
    tier.check_invariants()
    tier.close()
    return found


def main() -> None:
    folder, rounds, seed, limit = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    dice = random.Random(seed)
    acknowledged: list[int] = []
    found: list[str] = []
    first = 0
    for count in range(rounds):
        fresh = killed(folder, limit, first, dice.uniform(0.0, 0.03), after_first=count % 2 == 0)
        first = max([first, *fresh]) + 2 * IN_FLIGHT
        acknowledged += fresh
        found += wrongs(folder, limit, acknowledged[-120:])
    print(json.dumps({"rounds": rounds, "acknowledged": len(acknowledged), "wrong": found}))


if __name__ == "__main__":
    main()
