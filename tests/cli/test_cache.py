"""`anaphora cache`, as a user calls it."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from anaphora.blocks.eviction import LRU
from anaphora.cli.cache import cache
from anaphora.errors import ConfigError
from anaphora.tiers import archive
from anaphora.tiers.disk import DiskTier
from anaphora.tiers.store import BlockMeta, Outcome
from support.stored_blocks import OTHER_SPACE, SIZE, chain, payloads, room

MIB = 1 << 20
OURS = chain("a", 5)
THEIRS = chain("b", 3, space=OTHER_SPACE)


def store(path: Path, blocks: list[BlockMeta], when: float | None = None) -> None:
    tier = DiskTier(path, 4 * MIB, LRU(), wall_clock=lambda: time.time() if when is None else when)
    assert tier.save(blocks, payloads(blocks)) == [Outcome.OK] * len(blocks)
    tier.close()


def here(path: Path, blocks: list[BlockMeta]) -> list[bool]:
    """Which of the blocks are there; what is there is right."""
    tier, into = DiskTier(path, 8 * MIB, LRU()), room(len(blocks))
    outcomes = tier.load(blocks, into)
    for view, right, outcome in zip(into, payloads(blocks), outcomes, strict=True):
        assert outcome is not Outcome.OK or view == right
    tier.close()
    return [outcome is Outcome.OK for outcome in outcomes]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cache, [str(argument) for argument in arguments])


def run_json(*arguments: object, exit_code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["schema_version"] == 1
    assert found["command"] == f"cache {arguments[0]}"
    return found


def damage(path: Path) -> None:
    """Flip a byte in one payload."""
    for file in path.glob("seg-*.kv"):
        raw = bytearray(file.read_bytes())
        at = raw.find(bytes(payloads(OURS[1:2])[0]))
        if at >= 0:
            raw[at + 100] ^= 1
            file.write_bytes(raw)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    store(path, OURS)
    store(path, THEIRS)
    return path


def test_stats_count_by_model(folder: Path) -> None:
    found = run_json("stats", folder)
    models = {space["model"]: space for space in found["spaces"]}
    assert {name: space["blocks"] for name, space in models.items()} == {"model": 5, "other": 3}
    assert models["model"]["tokens"] == 80
    assert models["model"]["payload_bytes"] == 5 * SIZE
    assert found["used_bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert found["held"] is False
    assert "other" in run("stats", folder).stdout


def test_stats_and_verify_work_beside_a_server(folder: Path) -> None:
    server = DiskTier(folder, 4 * MIB, LRU())
    assert run_json("stats", folder)["held"] is True
    assert run_json("verify", folder)["blocks"] == 8
    damage(folder)
    found = run_json("verify", folder, exit_code=1)
    assert found["removed"] is False
    assert len(found["corrupt"]) == 1
    assert server.load(OURS, room(5)).count(Outcome.CORRUPT) == 1
    server.close()
    assert run_json("verify", folder)["blocks"] == 7


def test_verify_removes_what_is_damaged(folder: Path) -> None:
    damage(folder)
    result = run("verify", folder)
    assert result.exit_code == 1
    assert "1 damaged, removed" in result.stdout
    result = run("verify", folder)
    assert result.exit_code == 0
    assert "7 blocks are whole" in result.stdout
    assert here(folder, OURS) == [True, False, True, True, True]


def test_verify_removes_a_damaged_file(folder: Path) -> None:
    file = sorted(folder.glob("seg-*.kv"))[0]
    with file.open("r+b") as raw:
        raw.write(b"XXXX")
    assert len(run_json("verify", folder, exit_code=1)["corrupt"]) == 1
    assert not file.exists()
    assert run_json("verify", folder)["corrupt"] == []


def test_clear_everything(folder: Path) -> None:
    assert run_json("clear", folder)["removed_blocks"] == 8
    assert not list(folder.glob("seg-*"))
    assert run_json("stats", folder)["spaces"] == []


def test_clear_one_model(folder: Path) -> None:
    assert "3 blocks removed" in run("clear", folder, "--model", "other").stdout
    assert here(folder, OURS + THEIRS) == [True] * 5 + [False] * 3
    with pytest.raises(ConfigError, match="it holds model"):
        cache(["clear", str(folder), "--model", "nonesuch"], standalone_mode=False)


def test_clear_what_is_old(tmp_path: Path) -> None:
    new, future = chain("new", 2), chain("future", 2)
    store(tmp_path, OURS, time.time() - 8 * 86_400)
    store(tmp_path, new)
    store(tmp_path, future, time.time() + 1e7)  # the clock was put back since
    assert run_json("clear", tmp_path, "--older-than", "7d")["removed_blocks"] == 5
    assert here(tmp_path, OURS + new + future) == [False] * 5 + [True] * 4
    assert run("clear", tmp_path, "--older-than", "7 moons").exit_code == 2


def test_clear_refuses_while_a_server_runs(folder: Path) -> None:
    server = DiskTier(folder, 4 * MIB, LRU())
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        cache(["clear", str(folder)], standalone_mode=False)
    server.close()


def test_a_cache_moves_to_another_machine(folder: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "warm.kv", tmp_path / "there"
    found = run_json("export", folder, file)
    assert found["blocks"] == 8
    assert file.stat().st_mode & 0o777 == 0o600
    assert run_json("import", other, file)["blocks"] == 8
    assert here(other, OURS + THEIRS) == [True] * 8
    assert {space["model"] for space in run_json("stats", other)["spaces"]} == {"model", "other"}
    assert run_json("import", other, file)["blocks"] == 8  # again: nothing twice
    assert run_json("stats", other)["spaces"][0]["blocks"] == 5


def test_export_beside_a_server_and_without_the_damaged(folder: Path, tmp_path: Path) -> None:
    damage(folder)
    server = DiskTier(folder, 4 * MIB, LRU())
    found = run_json("export", folder, tmp_path / "warm.kv", exit_code=1)
    server.close()
    assert (found["blocks"], found["skipped"]) == (7, 1)
    assert run_json("import", tmp_path / "there", tmp_path / "warm.kv")["blocks"] == 7


def test_an_export_that_is_interrupted_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    def interrupted(blocks: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        archive.export(folder, tmp_path / "warm.kv", interrupted)
    assert not list(tmp_path.glob("warm.kv*"))


def test_import_keeps_its_limit(folder: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "warm.kv", tmp_path / "there"
    run("export", folder, file)
    found = run_json("import", other, file, "--limit", "50000", exit_code=1)
    assert found["skipped"] > 0
    assert sum(part.stat().st_size for part in other.iterdir()) <= 50_000


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.55, 0.9, 0.9999])
def test_a_cut_export_gives_what_is_whole(folder: Path, tmp_path: Path, share: float) -> None:
    file, other = tmp_path / "warm.kv", tmp_path / "there"
    run("export", folder, file)
    os.truncate(file, int(file.stat().st_size * share))
    result = run("import", other, file)
    assert result.exit_code != 0
    if isinstance(result.exception, ConfigError):
        assert "no export" in str(result.exception)
    else:
        assert "cut short" in result.stderr
        stored = here(other, OURS + THEIRS).count(True)
        assert abs(stored - 8 * share) <= 1


@pytest.mark.parametrize("at", [0, 9, 16, 17, 40, 100, 130, 250, 300, 400, 5000])
def test_a_damaged_export_gives_nothing_wrong(folder: Path, tmp_path: Path, at: int) -> None:
    file, other = tmp_path / "warm.kv", tmp_path / "there"
    run("export", folder, file)
    raw = bytearray(file.read_bytes())
    raw[at] ^= 0x55
    file.write_bytes(raw)
    result = run("import", other, file)
    assert result.exit_code != 0
    assert result.exception is None or isinstance(result.exception, (SystemExit, ConfigError))
    if other.exists():
        here(other, OURS + THEIRS)


@pytest.mark.parametrize("action", ["stats", "verify", "clear"])
def test_no_such_folder_is_said(tmp_path: Path, action: str) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        cache([action, str(tmp_path / "none")], standalone_mode=False)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("action", ["stats", "verify", "clear"])
def test_a_folder_of_something_else_is_said_and_left_alone(tmp_path: Path, action: str) -> None:
    with pytest.raises(ConfigError, match="holds no disk cache"):
        cache([action, str(tmp_path)], standalone_mode=False)
    assert not list(tmp_path.iterdir())
    (tmp_path / "lock").write_text("the lock of another program")
    (tmp_path / "seg-00000001.kv").write_text("its data")
    with pytest.raises(ConfigError, match="holds no disk cache"):
        cache([action, str(tmp_path)], standalone_mode=False)
    with pytest.raises(ConfigError, match="another program"):
        DiskTier(tmp_path, 4 * MIB, LRU())
    assert (tmp_path / "lock").read_text() == "the lock of another program"
    assert (tmp_path / "seg-00000001.kv").read_text() == "its data"


def test_a_read_only_cache_is_read_and_nobody_is_said_to_use_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(folder)
    plain_open = os.open

    def read_only(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system")
        return plain_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", read_only)
    assert run_json("stats", folder)["held"] is False
    found = run_json("verify", folder, exit_code=1)
    assert (found["removed"], found["held"]) == (False, False)
    assert "cannot write" in run("verify", folder).stdout
    for result in (run("clear", folder), run("export", folder, folder / "warm.kv")):
        assert "Read-only" in str(result.exception)
        assert getattr(result.exception, "exit_code", None) == 3


def test_export_into_a_place_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    result = run("export", folder, tmp_path / "none" / "warm.kv")
    assert "cannot be written" in str(result.exception)
    assert getattr(result.exception, "exit_code", None) == 3
