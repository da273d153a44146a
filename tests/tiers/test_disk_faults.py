"""The disk tier when bytes, files, devices and clocks go wrong: a miss each time, never a wrong byte or a crash."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anaphora.blocks.eviction import LRU
from anaphora.tiers import segment as segments
from anaphora.tiers.disk import DiskTier
from anaphora.tiers.format import header_bytes
from anaphora.tiers.memory import PAGE
from anaphora.tiers.segment import data_start, file_bytes, slot_bytes
from anaphora.tiers.store import BlockMeta, Outcome, StoreError
from support.stored_blocks import SIZE, chain, payload, payloads, room

MIB = 1 << 20
BLOCKS = chain("a", 4)
SLOT = slot_bytes(16, SIZE)
HEAD = header_bytes(16)


def disk(path: Path, limit: int = MIB) -> DiskTier:
    return DiskTier(path, limit, LRU())


def filled(path: Path) -> Path:
    """A closed folder of four blocks; its segment's file."""
    tier = disk(path)
    assert tier.save(BLOCKS, payloads(BLOCKS)) == [Outcome.OK] * 4
    tier.close()
    (file,) = path.glob("seg-*.kv")
    return file


def check(path: Path) -> list[Outcome]:
    """Open, load all twice: what is OK is right, what is not is gone, and the folder goes on working."""
    tier, into = disk(path), room(4)
    outcomes = tier.load(BLOCKS, into)
    for block, outcome, view in zip(BLOCKS, outcomes, into, strict=True):
        assert outcome is not Outcome.OK or view == payload(block)
    tier.check_invariants()
    again = tier.load(BLOCKS, room(4))
    assert again == [Outcome.OK if outcome is Outcome.OK else Outcome.MISS for outcome in outcomes]
    assert tier.save(BLOCKS, payloads(BLOCKS)) == [Outcome.OK] * 4
    assert tier.load(BLOCKS, into) == [Outcome.OK] * 4
    assert into == payloads(BLOCKS)
    assert sum(file.stat().st_size for file in path.iterdir()) <= MIB
    tier.close()
    return outcomes


def slots(file: Path) -> int:
    return next(n for n in range(1, 10_000) if file_bytes(SLOT, n) == file.stat().st_size)


def regions() -> Iterator[tuple[str, Callable[[int], int], bool]]:
    """(name, offset from the number of slots, whether block 1 must be lost)."""
    for at in (0, 7, 8, 11, 12, 16, 31, 32, 60, 150):
        yield f"superblock+{at}", lambda n, at=at: at, True  # type: ignore[misc]
    yield "superblock's rest", lambda n: PAGE - 1, False
    for at in range(0, 56, 3):
        yield f"record+{at}", lambda n, at=at: PAGE + 64 + at, True  # type: ignore[misc]
    for at in (56, 60, 63):
        yield f"record's last use+{at}", lambda n, at=at: PAGE + 64 + at, False  # type: ignore[misc]
    yield "free record", lambda n: PAGE + 64 * (n - 1) + 3, False
    yield "table's rest", lambda n: data_start(n) - 1, False
    for at in range(0, HEAD, 5):
        yield f"header+{at}", lambda n, at=at: data_start(n) + SLOT + at, True  # type: ignore[misc]
    yield "header's rest", lambda n: data_start(n) + SLOT + PAGE - 1, False
    for at in (0, 1, SIZE // 2, SIZE - 1):
        yield f"payload+{at}", lambda n, at=at: data_start(n) + SLOT + PAGE + at, True  # type: ignore[misc]
    yield "free slot", lambda n: data_start(n) + (n - 1) * SLOT + 5, False


@pytest.mark.parametrize(("where", "lost"), [region[1:] for region in regions()], ids=[r[0] for r in regions()])
def test_a_flipped_byte_is_a_miss(tmp_path: Path, where: Callable[[int], int], lost: bool) -> None:
    file = filled(tmp_path)
    at = where(slots(file))
    with file.open("r+b") as raw:
        raw.seek(at)
        byte = raw.read(1)[0]
        raw.seek(at)
        raw.write(bytes([byte ^ 0x20]))
    outcomes = check(tmp_path)
    assert (outcomes[1] is not Outcome.OK) == lost
    if at >= PAGE:  # a damaged superblock costs its segment, anything else its block
        assert [outcomes[i] for i in (0, 2, 3)] == [Outcome.OK] * 3


@pytest.mark.parametrize("part", ["nothing", "superblock", "table", "header", "payload", "last byte"])
def test_a_truncated_file_keeps_what_is_whole(tmp_path: Path, part: str) -> None:
    file = filled(tmp_path)
    count = slots(file)
    size = {
        "nothing": 0,
        "superblock": 100,
        "table": PAGE + 64 + 20,
        "header": data_start(count) + 3 * SLOT + 50,
        "payload": data_start(count) + 3 * SLOT + PAGE + SIZE // 2 + 3,
        "last byte": data_start(count) + 4 * SLOT - 1,
    }[part]
    os.truncate(file, size)
    outcomes = check(tmp_path)
    whole = {"nothing": 0, "superblock": 0, "table": 0}.get(part, 3)
    assert outcomes[:whole] == [Outcome.OK] * whole
    assert outcomes[3] is not Outcome.OK


def test_a_file_cut_while_it_is_open_is_a_miss(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    tier.save(BLOCKS, payloads(BLOCKS))
    (file,) = tmp_path.glob("seg-*.kv")
    os.truncate(file, data_start(slots(file)) + SLOT + 100)
    assert tier.load(BLOCKS, room(4)) == [Outcome.OK] + [Outcome.CORRUPT] * 3
    assert tier.stats().corrupt == 3
    tier.check_invariants()
    tier.close()


def test_swapped_slots_are_misses(tmp_path: Path) -> None:
    file = filled(tmp_path)
    raw = bytearray(file.read_bytes())
    first, second = data_start(slots(file)), data_start(slots(file)) + SLOT
    raw[first : first + SLOT], raw[second : second + SLOT] = raw[second : second + SLOT], raw[first : first + SLOT]
    file.write_bytes(raw)
    assert check(tmp_path) == [Outcome.CORRUPT, Outcome.CORRUPT, Outcome.OK, Outcome.OK]


def test_swapped_records_are_misses(tmp_path: Path) -> None:
    file = filled(tmp_path)
    raw = bytearray(file.read_bytes())
    first, second = PAGE, PAGE + 64
    raw[first : first + 64], raw[second : second + 64] = raw[second : second + 64], raw[first : first + 64]
    file.write_bytes(raw)
    assert check(tmp_path) == [Outcome.MISS, Outcome.MISS, Outcome.OK, Outcome.OK]


def test_swapped_files_serve_what_they_hold(tmp_path: Path) -> None:
    """A segment says itself what is in it; its name means nothing."""
    tier = disk(tmp_path, 2 * MIB)
    blocks = chain("many", 60)
    tier.save(blocks, payloads(blocks))
    tier.close()
    one, two = sorted(tmp_path.glob("seg-*.kv"))[:2]
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    tier, into = disk(tmp_path, 2 * MIB), room(60)
    assert tier.load(blocks, into) == [Outcome.OK] * 60
    assert into == payloads(blocks)
    tier.close()


def test_a_file_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    file = filled(tmp_path)
    shutil.copy(file, tmp_path / "seg-00000007.kv")
    assert check(tmp_path) == [Outcome.OK] * 4


def test_a_stale_table_over_newer_slots_is_a_miss(tmp_path: Path) -> None:
    file = filled(tmp_path)
    old = file.read_bytes()[: data_start(slots(file))]
    tier, fresh = disk(tmp_path), chain("b", slots(file))
    tier.discard([block.key for block in BLOCKS])
    tier.save(fresh, payloads(fresh))
    tier.close()
    with file.open("r+b") as raw:
        raw.write(old)
    assert check(tmp_path) == [Outcome.CORRUPT] * 4


def test_an_older_version_of_the_format_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("anaphora.tiers.format.VERSION", 0)
        filled(tmp_path)
    assert check(tmp_path) == [Outcome.CORRUPT] * 4
    with monkeypatch.context() as patch:
        patch.setattr("anaphora.tiers.segment.VERSION", 2)
        shutil.rmtree(tmp_path)
        filled(tmp_path)
    tier = disk(tmp_path)
    assert tier.contains([block.key for block in BLOCKS]) == [False] * 4
    assert tier.stats().corrupt == 1
    tier.close()


def test_leftovers_of_a_killed_start_are_removed(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "seg-00000009.tmp").write_bytes(bytes(2 * MIB))
    (tmp_path / "seg-zz.kv").write_bytes(b"junk")
    assert check(tmp_path) == [Outcome.OK] * 4
    assert not (tmp_path / "seg-00000009.tmp").exists()


def failing(times: int, code: int, real: Callable[..., int]) -> Callable[..., int]:
    left = [times]

    def call(*arguments: object) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    return call


def test_a_read_error_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    tier, into = disk(tmp_path), room(4)
    # the call for all four, and those for the first two alone
    monkeypatch.setattr(segments, "preadv", failing(3, errno.EIO, os.preadv))
    assert tier.load(BLOCKS, into) == [Outcome.FAILED, Outcome.FAILED, Outcome.OK, Outcome.OK]
    assert into[2:] == payloads(BLOCKS[2:])
    assert tier.contains([block.key for block in BLOCKS]) == [False, False, True, True]
    assert tier.stats().failed == 2
    tier.check_invariants()
    tier.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("call", ["pwritev", "pwrite", "posix_fallocate"])
def test_a_write_error_turns_writing_off_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, code: int
) -> None:
    now = [0.0]
    tier = DiskTier(tmp_path, MIB, LRU(), clock=lambda: now[0])
    first = chain("first", 1)
    if call != "posix_fallocate":
        tier.save(first, payloads(first))
    monkeypatch.setattr(segments, call, failing(1, code, getattr(segments, call)))
    with caplog.at_level(logging.WARNING):
        outcomes = tier.save(BLOCKS, payloads(BLOCKS))
    # neighbours are written in one call; what has no place yet is not tried any more
    assert outcomes == [Outcome.FAILED] + [Outcome.DROPPED if call == "posix_fallocate" else Outcome.FAILED] * 3
    assert os.strerror(code) in caplog.text
    assert tier.stats().off == os.strerror(code)
    if call != "posix_fallocate":
        assert tier.load(first, room(1)) == [Outcome.OK]
    now[0] = 31.0
    assert tier.save(BLOCKS, payloads(BLOCKS)) == [Outcome.OK] * 4
    assert tier.stats().off == ""
    tier.check_invariants()
    tier.close()
    assert check(tmp_path) == [Outcome.OK] * 4


def test_a_short_write_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, real = disk(tmp_path), os.pwritev
    monkeypatch.setattr(segments, "pwritev", lambda fd, parts, at: real(fd, [parts[0][:PAGE]], at))
    assert tier.save(BLOCKS[:1], payloads(BLOCKS[:1])) == [Outcome.FAILED]
    assert tier.contains([BLOCKS[0].key]) == [False]
    tier.check_invariants()
    tier.close()


def test_a_file_size_limit_of_the_process_is_survived(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    tier = disk(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        assert tier.save(BLOCKS, payloads(BLOCKS)) == [Outcome.FAILED] + [Outcome.DROPPED] * 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("seg-*"))
    tier.close()
    assert disk(tmp_path).save(BLOCKS, payloads(BLOCKS)) == [Outcome.OK] * 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs is not permitted here; RLIMIT_FSIZE and injected ENOSPC stand in for it")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_file_system_is_survived(small_disk: Path) -> None:
    tier = DiskTier(small_disk, 64 * MIB, LRU())
    outcomes: list[Outcome] = []
    kept: list[BlockMeta] = []
    for name in range(200):
        block = chain(name, 1)
        outcome = tier.save(block, payloads(block, 20_000))
        outcomes += outcome
        kept += block if outcome[0] is Outcome.OK else []
    assert Outcome.FAILED in outcomes
    assert tier.stats().off
    into = room(len(kept), 20_000)
    assert tier.load(kept, into) == [Outcome.OK] * len(kept)
    assert into == payloads(kept, 20_000)
    tier.check_invariants()
    tier.close()


def test_a_read_only_file_system_is_said(small_disk: Path) -> None:
    disk(small_disk, MIB // 2).close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StoreError, match="cannot be used as a disk cache: Read-only"):
        disk(small_disk)
    with pytest.raises(StoreError, match="Read-only"):
        disk(small_disk / "new")


def test_a_folder_that_is_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used as a disk cache"):
        disk(tmp_path / "file")
