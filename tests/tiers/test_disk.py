"""The disk tier as it should work: restart, limit, eviction, other models, permissions, the lock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from anaphora.blocks.eviction import LRU, POLICIES, make_policy
from anaphora.errors import ConfigError
from anaphora.tiers import places, segment
from anaphora.tiers.disk import DiskTier
from anaphora.tiers.memory import page_buffer
from anaphora.tiers.places import CALL_BYTES
from anaphora.tiers.segment import file_bytes, slot_bytes
from anaphora.tiers.store import BlockMeta, Outcome
from support.stored_blocks import OTHER_SPACE, SIZE, chain, key, payload, payloads, room

MIB = 1 << 20


def disk(path: Path, limit: int = MIB) -> DiskTier:
    return DiskTier(path, limit, LRU())


def bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def keys(blocks: list[BlockMeta]) -> list[bytes]:
    return [block.key for block in blocks]


@pytest.mark.parametrize("size", [1, 100, 4096, 8192, 10_000])
def test_what_was_saved_is_loaded_after_a_restart(tmp_path: Path, size: int) -> None:
    blocks, into = chain("a", 5), room(5, size)
    tier = disk(tmp_path)
    assert tier.save(blocks, payloads(blocks, size)) == [Outcome.OK] * 5
    assert tier.load(blocks, into) == [Outcome.OK] * 5
    assert into == payloads(blocks, size)
    tier.close()
    tier, into = disk(tmp_path), room(5, size)
    assert tier.contains([*keys(blocks), key("x")]) == [True] * 5 + [False]
    assert tier.load(blocks, into) == [Outcome.OK] * 5
    assert into == payloads(blocks, size)
    tier.check_invariants()
    tier.close()


def test_page_aligned_memory_is_read_and_written_as_it_is(tmp_path: Path) -> None:
    block, memory, into = chain("a", 1)[0], page_buffer(SIZE), page_buffer(SIZE)
    memory[:] = payload(block)
    tier = disk(tmp_path)
    assert tier.save([block], [memory]) == tier.load([block], [into]) == [Outcome.OK]
    assert into == payload(block)
    tier.close()


class Calls:
    """Counts the system's calls that move blocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts = {"preadv": 0, "pwritev": 0}
        for name in self.counts:
            monkeypatch.setattr(segment, name, self._counted(name))

    def _counted(self, name: str) -> Callable[..., int]:
        real: Callable[..., int] = getattr(os, name)

        def call(*arguments: object) -> int:
            self.counts[name] += 1
            return real(*arguments)

        return call

    def take(self) -> tuple[int, int]:
        """(reads, writes) since the last time."""
        taken = self.counts["preadv"], self.counts["pwritev"]
        self.counts.update(preadv=0, pwritev=0)
        return taken


@pytest.mark.parametrize("size", [SIZE, SIZE + 100], ids=["whole pages", "not whole pages"])
def test_neighbours_move_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    calls, tier, blocks, into = Calls(monkeypatch), disk(tmp_path), chain("a", 6), room(6, size)
    assert tier.save(blocks, payloads(blocks, size)) == [Outcome.OK] * 6
    assert calls.take() == (0, 1)
    order = [4, 2, 5, 0, 3, 1]  # in whatever order they are asked for
    assert tier.load([blocks[i] for i in order], [into[i] for i in order]) == [Outcome.OK] * 6
    assert into == payloads(blocks, size)
    assert calls.take() == (1, 0)
    tier.discard([blocks[2].key])
    assert tier.load(blocks, into) == [Outcome.OK] * 2 + [Outcome.MISS] + [Outcome.OK] * 3
    assert calls.take() == (2, 0)
    tier.close()


def test_a_call_is_not_larger_than_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, size = Calls(monkeypatch), 3 * CALL_BYTES // 8
    tier, blocks = disk(tmp_path, 64 * MIB), chain("a", 5)
    assert tier.save(blocks, payloads(blocks, size)) == [Outcome.OK] * 5
    assert tier.load(blocks, into := room(5, size)) == [Outcome.OK] * 5
    assert into == payloads(blocks, size)
    assert calls.take() == (3, 3)
    tier.close()


def test_what_takes_the_place_of_a_chain_lies_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains are evicted from their end."""
    limit = 16 + file_bytes(slot_bytes(16, SIZE), 6)
    monkeypatch.setattr(places, "_USUAL_SEGMENT", limit)
    monkeypatch.setattr(places, "_FEWEST_SEGMENTS", 1)
    tier, old, new = disk(tmp_path, limit), chain("old", 6), chain("new", 6)
    tier.save(old, payloads(old))
    calls = Calls(monkeypatch)
    assert tier.save(new, payloads(new)) == [Outcome.OK] * 6
    assert tier.load(new, into := room(6)) == [Outcome.OK] * 6
    assert into == payloads(new)
    assert calls.take() == (1, 1)
    tier.check_invariants()
    tier.close()


def test_a_save_of_more_than_there_is_room_for(tmp_path: Path) -> None:
    """Of a chain the beginning stays, of blocks that have nothing to do with each other the last."""
    limit = 16 + 4 * file_bytes(slot_bytes(16, SIZE), 1)
    tier, blocks = disk(tmp_path, limit), chain("a", 6)
    assert tier.save(blocks, payloads(blocks)) == [Outcome.OK] * 4 + [Outcome.DROPPED] * 2
    tier.check_invariants()
    apart = [chain(name, 1)[0] for name in range(6)]
    assert tier.save(apart, payloads(apart)) == [Outcome.OK] * 6
    assert tier.contains(keys(apart)) == [False] * 2 + [True] * 4
    tier.check_invariants()
    twice = [*apart[4:], *chain("b", 1), *chain("b", 1)]
    assert tier.save(twice, payloads(twice)) == [Outcome.OK] * 4
    assert tier.load(twice, into := room(4)) == [Outcome.OK] * 4
    assert into == payloads(twice)
    tier.check_invariants()
    tier.close()


def test_read_only_memory_can_be_saved(tmp_path: Path) -> None:
    block, into = chain("a", 1)[0], room(1)
    tier = disk(tmp_path)
    assert tier.save([block], [memoryview(bytes(payload(block)))]) == tier.load([block], into) == [Outcome.OK]
    assert into == payloads([block])
    tier.close()


def test_the_limit_is_never_exceeded_and_the_oldest_leaves_go(tmp_path: Path) -> None:
    tier = disk(tmp_path, 300_000)
    for name in range(60):
        blocks = chain(name, 3)
        assert tier.save(blocks, payloads(blocks)) == [Outcome.OK] * 3
        assert bytes_of(tmp_path) == tier.used_bytes <= 300_000
        tier.check_invariants()
    assert tier.contains(keys(chain(59, 3))) == [True] * 3
    assert tier.contains(keys(chain(0, 3))) == [False] * 3
    assert tier.stats().evicted == 180 - tier.stats().blocks
    tier.close()


def test_a_lower_limit_holds_from_the_start(tmp_path: Path) -> None:
    tier = disk(tmp_path, 4 * MIB)
    for name in range(100):
        blocks = chain(name, 3)
        tier.save(blocks, payloads(blocks))
    tier.close()
    assert bytes_of(tmp_path) > 2 * MIB
    tier = disk(tmp_path, 2 * MIB)
    assert bytes_of(tmp_path) <= 2 * MIB
    left = [name for name in range(100) if tier.contains(keys(chain(name, 3)))[0]]
    assert left
    assert left == list(range(left[0], 100))  # what was used last stayed
    tier.check_invariants()
    tier.close()


def test_a_lower_limit_keeps_the_beginning_of_a_long_prefix(tmp_path: Path) -> None:
    tier, blocks = disk(tmp_path, 4 * MIB), chain("long", 300)
    for at in range(0, 300, 10):
        tier.save(blocks[at : at + 10], payloads(blocks[at : at + 10]))
    tier.close()
    assert len(list(tmp_path.glob("seg-*"))) > 2
    tier = disk(tmp_path, 2 * MIB)
    left = tier.contains(keys(blocks))
    assert sum(left) < 300
    assert left.index(False) > 0.9 * sum(left) > 0  # what lies behind a block that is gone is of no use
    tier.close()


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    limit = 16 + 4 * file_bytes(slot_bytes(16, SIZE), 1)
    tier, blocks = disk(tmp_path, limit), [chain(name, 1)[0] for name in range(5)]
    tier.save(blocks, payloads(blocks))
    assert tier.contains(keys(blocks)) == [False, True, True, True, True]
    tier.load(blocks[1:2], room(1))
    tier.close()
    tier = disk(tmp_path, limit)
    extra = chain("extra", 1)
    tier.save(extra, payloads(extra))
    assert tier.contains(keys(blocks)) == [False, True, False, True, True]
    tier.close()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_keeps_the_limit_over_restarts(tmp_path: Path, policy: str) -> None:
    for start in range(0, 60, 20):
        tier = DiskTier(tmp_path, 300_000, make_policy(policy))
        for name in range(start, start + 20):
            blocks = chain(name, 3)
            assert tier.save(blocks, payloads(blocks)) == [Outcome.OK] * 3
            assert tier.load(blocks, into := room(3)) == [Outcome.OK] * 3
            assert into == payloads(blocks)
            assert bytes_of(tmp_path) <= 300_000
        tier.check_invariants()
        tier.close()


def test_another_models_blocks_live_beside_ours_and_take_their_place(tmp_path: Path) -> None:
    tier = disk(tmp_path, MIB)
    for name in range(40):
        blocks = chain(name, 3)
        tier.save(blocks, payloads(blocks))
    other = chain("a", 60, space=OTHER_SPACE)
    outcomes = tier.save(other, payloads(other, 20_000))
    tier.check_invariants()
    assert bytes_of(tmp_path) <= MIB
    stored = [block for block, outcome in zip(other, outcomes, strict=True) if outcome is Outcome.OK]
    assert len(stored) > 10
    assert tier.load(stored[:5], into := room(5, 20_000)) == [Outcome.OK] * 5
    assert into == payloads(stored[:5], 20_000)
    tier.close()


@pytest.mark.parametrize(
    "change",
    [{"tokens": b"\0" * 64}, {"parent": key("x")}, {"depth": 7}, {"space": OTHER_SPACE}],
    ids=lambda change: next(iter(change)),
)
def test_the_same_key_for_another_block_is_a_miss(tmp_path: Path, change: dict[str, bytes]) -> None:
    tier, block = disk(tmp_path), chain("a", 1)[0]
    tier.save([block], [payload(block)])
    assert tier.load([replace(block, **change)], room(1)) == [Outcome.CORRUPT]  # type: ignore[arg-type]
    assert tier.contains([block.key]) == [False]
    tier.check_invariants()
    tier.close()


def test_a_discarded_block_stays_away(tmp_path: Path) -> None:
    tier, blocks = disk(tmp_path), chain("a", 3)
    tier.save(blocks, payloads(blocks))
    tier.discard([blocks[2].key, key("x")])
    tier.check_invariants()
    tier.close()
    tier = disk(tmp_path)
    assert tier.contains(keys(blocks)) == [True, True, False]
    tier.close()


def test_a_clock_that_goes_back_changes_nothing(tmp_path: Path) -> None:
    times = iter([2e9, 1e9, 5.0, -3.0])
    tier = DiskTier(tmp_path, MIB, LRU(), wall_clock=lambda: next(times))
    blocks = [chain(name, 1)[0] for name in range(4)]
    for block in blocks:
        assert tier.save([block], payloads([block])) == [Outcome.OK]
    tier.close()
    tier = disk(tmp_path)
    assert tier.load(blocks, room(4)) == [Outcome.OK] * 4
    tier.close()


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    old = os.umask(0)
    try:
        tier = disk(folder)
        block = chain("a", 1)
        tier.save(block, payloads(block))
        tier.close()
    finally:
        os.umask(old)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


def test_a_second_server_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    with pytest.raises(ConfigError, match=f"process {os.getpid()}.*--remote-cache"):
        disk(tmp_path)
    code = (
        "import sys; from pathlib import Path; from anaphora.tiers.directory import DirectoryLock\n"
        "from anaphora.errors import ConfigError\n"
        "try: DirectoryLock(Path(sys.argv[1]))\nexcept ConfigError as error: print(error)"
    )
    answer = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert f"process {os.getpid()}" in answer.stdout
    tier.close()
    disk(tmp_path).close()


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    tier = disk(tmp_path)
    tier.close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_limit_that_holds_nothing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--disk-cache"):
        disk(tmp_path, 10_000)
