"""Whole or not there: whatever is killed, cut short or done twice at once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from anaphora.engine.sources.cache import MANIFEST, ModelCache, cache_root
from anaphora.errors import ConfigError, DownloadError

BUILDER = """
import os, sys
from pathlib import Path
from anaphora.engine.sources.cache import ModelCache
def build(work, folder):
    for i in range(4):
        (folder / f"part{i}").write_bytes(os.urandom(100_000 + i))
cache = ModelCache(Path(sys.argv[1]))
cache.make("key", "test", build)
print("started", flush=True)
while True:
    cache.make("key", "test", build, force=True)
"""


def write_parts(_work: Path, folder: Path) -> None:
    for i in range(2):
        (folder / f"part{i}").write_bytes(bytes(1000 + i))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ANAPHORA_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/anaphora"),
        ({"HOME": "/home/u"}, "/home/u/.cache/anaphora"),
    ],
)
def test_where_the_cache_is(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANAPHORA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)


def test_made_once_then_found(tmp_path: Path) -> None:
    cache, calls = ModelCache(tmp_path), []

    def build(work: Path, folder: Path) -> None:
        calls.append(work)
        write_parts(work, folder)

    assert cache.find("key") is None
    path = cache.make("key", "test", build)
    assert cache.make("key", "test", build, verify=True) == path == cache.find("key")
    assert sorted(file.name for file in path.iterdir()) == [MANIFEST, "part0", "part1"]
    assert len(calls) == 1
    assert cache.make("key", "test", build, force=True) == path
    assert len(calls) == 2
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"files": 3}', '{"files": {"part0": {}}}', '{"files": {"gone": {"size": 1}}}']
)
def test_a_damaged_manifest_means_not_there(tmp_path: Path, content: str) -> None:
    cache = ModelCache(tmp_path)
    (cache.make("key", "test", write_parts) / MANIFEST).write_text(content)
    assert cache.find("key", verify=True) is None


def test_a_builder_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    path = cache.make("key", "test", write_parts)

    def fail(_work: Path, folder: Path) -> None:
        (folder / "part0").write_bytes(b"half")
        raise DownloadError("the other side failed")

    with pytest.raises(DownloadError, match="the other side"):
        cache.make("key", "test", fail, force=True)
    assert cache.find("key", verify=True) == path
    assert not list((tmp_path / "work").iterdir())


def test_killed_at_any_moment_a_model_is_whole_or_not_there(tmp_path: Path) -> None:
    rng, cache, found = random.Random(7), ModelCache(tmp_path), 0
    for _ in range(12):
        child = subprocess.Popen([sys.executable, "-c", BUILDER, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"started\n"
        time.sleep(rng.uniform(0, 0.15))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        models = tmp_path / "models"
        for folder in models.iterdir() if models.is_dir() else ():
            assert cache.find(folder.name, verify=True) == folder
            found += 1
    assert found > 6, "only between two renames there is none"
    cache.make("other", "test", write_parts)
    assert not list((tmp_path / "work").iterdir()), "what dead processes left is removed"


def test_a_living_process_keeps_its_work_folder(tmp_path: Path) -> None:
    cache, inside, leave = ModelCache(tmp_path), threading.Event(), threading.Event()

    def slow(work: Path, folder: Path) -> None:
        write_parts(work, folder)
        inside.set()
        assert leave.wait(60)

    first = threading.Thread(target=cache.make, args=("slow", "test", slow))
    first.start()
    assert inside.wait(60)
    cache.make("quick", "test", write_parts)
    assert [path.name.partition("~")[0] for path in (tmp_path / "work").iterdir()] == ["slow"]
    # A second one that wants the same waits, says so, and builds nothing.
    stages: list[str] = []

    def never(_work: Path, _folder: Path) -> None:
        raise AssertionError("built twice")

    def note(stage: str, _done: int, _total: int | None) -> None:
        stages.append(stage)
        leave.set()

    cache.make("slow", "test", never, progress=note)
    first.join()
    assert stages == ["waiting for another process that fetches the same model"]


def test_a_full_disk_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
import resource, sys
from pathlib import Path
from anaphora.engine.sources.cache import ModelCache
from anaphora.errors import DownloadError
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
def build(work, folder):
    (folder / "x").write_bytes(bytes(9999))
try:
    ModelCache(Path({str(tmp_path)!r})).make("key", "test", build)
except DownloadError as error:
    print(error)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert answer.startswith(f"No room to write under {tmp_path}")
    assert "ANAPHORA_CACHE" in answer
    assert not list((tmp_path / "work").iterdir())
    assert not (tmp_path / "models").exists()


def test_a_read_only_cache_still_serves_what_it_has(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    path = cache.make("key", "test", write_parts)
    for folder in (tmp_path, tmp_path / "work", tmp_path / "locks"):
        folder.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("root may write anywhere")
    try:
        assert cache.make("key", "test", write_parts) == path
        with pytest.raises(ConfigError, match="ANAPHORA_CACHE"):
            cache.make("other", "test", write_parts)
    finally:
        for folder in (tmp_path, tmp_path / "work", tmp_path / "locks"):
            folder.chmod(0o700)


def test_a_users_file_is_hashed_again_only_when_it_changed(tmp_path: Path) -> None:
    cache, file = ModelCache(tmp_path / "cache"), tmp_path / "file"
    file.write_bytes(b"one")
    reads: list[str] = []

    def note(stage: str, _done: int, _total: int | None) -> None:
        reads.append(stage)

    first = cache.sha256(file, note)
    assert cache.sha256(file, note) == first
    assert len(reads) == 1
    file.write_bytes(b"two")
    assert cache.sha256(file, note) != first
    assert len(reads) == 2
