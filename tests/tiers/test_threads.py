"""Several threads in one store at once: every load is right or a miss, and no slot is lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from anaphora.blocks.eviction import LRU
from anaphora.tiers.disk import DiskTier
from anaphora.tiers.lanes import Lane
from anaphora.tiers.ram import ENTRY_BYTES, RamTier
from anaphora.tiers.store import Outcome
from support.stored_blocks import SIZE, chain, payload, room

NAMES = [chain(name, 3) for name in range(12)]


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_threads_save_load_and_discard_together(tmp_path: Path, kind: str) -> None:
    tier: RamTier | DiskTier = (
        RamTier(20 * (SIZE + ENTRY_BYTES), SIZE, LRU()) if kind == "ram" else DiskTier(tmp_path, 300_000, LRU())
    )
    wrong: list[str] = []

    def work(seed: int) -> None:
        dice, into = random.Random(seed), room(3)
        for _ in range(250):
            blocks = dice.choice(NAMES)[dice.randrange(3) :]
            action = dice.random()
            if action < 0.45:
                tier.save(blocks, [payload(block) for block in blocks])
            elif action < 0.9:
                outcomes = tier.load(blocks, into[: len(blocks)])
                for block, outcome, view in zip(blocks, outcomes, into, strict=False):
                    if outcome not in (Outcome.OK, Outcome.MISS) or (outcome is Outcome.OK and view != payload(block)):
                        wrong.append(f"{outcome}")
            elif action < 0.95:
                tier.used([block.key for block in blocks])
            else:
                tier.discard([blocks[0].key])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    tier.check_invariants()
    assert tier.stats().hits > 0
    tier.close()


def test_a_lane_lets_loads_pass_and_keeps_saves_in_order() -> None:
    lane, begun, gate = Lane("test", 2, 10), threading.Event(), threading.Event()
    done: list[str] = []

    def job(name: str, wait: bool = False) -> Callable[[], None]:
        def run() -> None:
            if wait:
                begun.set()
                gate.wait(10)
            done.append(name)

        return run

    assert lane.save(job("save 1", wait=True), 4)
    assert begun.wait(10)
    assert lane.save(job("save 2"), 7)
    assert not lane.save(job("too many"), 4)
    passed = threading.Event()
    assert lane.load(passed.set)
    assert passed.wait(10)
    assert lane.load(job("load"))
    gate.set()
    assert lane.drain(10)
    assert done.index("save 1") < done.index("save 2")
    assert sorted(done) == ["load", "save 1", "save 2"]
    assert lane.dropped == 4
    assert lane.close(10)
    assert not lane.load(job("late"))


def test_a_job_that_raises_is_logged_and_the_lane_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    lane = Lane("test", 1, 10)

    def broken() -> None:
        raise ValueError("oops")

    lane.load(broken)
    done = threading.Event()
    lane.load(done.set)
    assert done.wait(10)
    assert "oops" in caplog.text
    assert lane.close(10)


def test_a_closed_lane_finishes_what_was_queued() -> None:
    lane, done = Lane("test", 2, 100), []
    for number in range(50):
        lane.save(lambda number=number: done.append(number), 1)  # type: ignore[misc]
    assert lane.close(10)
    assert done == list(range(50))
