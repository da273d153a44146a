"""The folder of models Anaphora made itself: whole or not there, whatever is killed when.

    ROOT/models/KEY/        a finished model, with its manifest anaphora.json
    ROOT/work/KEY~RANDOM/   one being made; renamed into models/ as the last act
    ROOT/locks/KEY.lock     held (flock) while KEY is made; the kernel frees it when the holder dies
    ROOT/digests/           SHA-256 of files hashed before, by path, size and times

A work folder whose lock is free belongs to a dead process, and the next process that makes anything removes it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anaphora.errors import AnaphoraError, ConfigError, DownloadError

MANIFEST = "anaphora.json"
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CHUNK = 1 << 20

Progress = Callable[[str, int, int | None], None]
"""(what is being done, bytes done, bytes in all or None while unknown); called often, never twice at once."""


def quiet(_stage: str, _done: int, _total: int | None) -> None:
    """The progress nobody watches."""


def cache_root() -> Path:
    """$ANAPHORA_CACHE, else $XDG_CACHE_HOME/anaphora, else ~/.cache/anaphora. Not created here."""
    if own := os.environ.get("ANAPHORA_CACHE"):
        return Path(own).expanduser().absolute()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser().absolute() / "anaphora"
    return Path.home() / ".cache" / "anaphora"


def sha256_file(path: Path, stage: str = "", progress: Progress = quiet) -> str:
    """Hex SHA-256 of a file, read once in 1 MiB pieces."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
            done += len(piece)
            progress(stage, done, total)
    return digest.hexdigest()


class ModelCache:
    """The models under one root. Reading a finished model writes nothing, so the root may be read-only then."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, key: str, *, verify: bool = False, progress: Progress = quiet) -> Path | None:
        """The finished folder of `key`, or None when it is not there or not what its manifest says.

        Sizes are always compared; with `verify` every byte is read and hashed.
        """
        folder = self.root / "models" / key
        try:
            files = json.loads((folder / MANIFEST).read_text())["files"]
            for name, facts in files.items():
                path = folder / name
                if path.stat().st_size != facts["size"]:
                    return None
                if verify and sha256_file(path, "verifying", progress) != facts["sha256"]:
                    return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return folder

    def make(
        self,
        key: str,
        source: str,
        build: Callable[[Path, Path], None],
        *,
        force: bool = False,
        verify: bool = False,
        progress: Progress = quiet,
    ) -> Path:
        """The folder of `key`, built first if it is missing or damaged, or if `force`.

        `build(work, folder)` fills `folder`; `work` is its scratch space and vanishes afterwards. The folder becomes
        visible, whole and on disk, by one rename. Only one process builds a key at a time; the others wait and use it.
        Raises ConfigError when the cache cannot be written, DownloadError when the disk is full, and what `build` does.
        """
        if not force and (folder := self.find(key, verify=verify, progress=progress)):
            return folder
        with self._writing(), self._lock(key, progress):
            # Another process may have built it while this one waited for the lock.
            if not force and (folder := self.find(key, verify=verify, progress=progress)):
                return folder
            self._sweep(key)
            work = Path(tempfile.mkdtemp(prefix=f"{key}~", dir=self._folder("work")))
            try:
                fresh = work / "model"
                fresh.mkdir(mode=0o700)
                build(work, fresh)
                _write_manifest(fresh, source, progress)
                return self._publish(fresh, key, work)
            finally:
                shutil.rmtree(work, ignore_errors=True)

    def sha256(self, path: Path, progress: Progress = quiet) -> str:
        """SHA-256 of a user's file, remembered by path, inode, size and times so that gigabytes are hashed once."""
        stat = path.stat()
        facts = [str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        note = self.root / "digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
        try:
            known = json.loads(note.read_text())
            if known["facts"] == facts:
                return str(known["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        digest = sha256_file(path, f"reading {path.name}", progress)
        with suppress(OSError):  # a note saves time only; a cache that is full or read-only may go without
            self._folder("digests")
            draft = note.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps({"facts": facts, "sha256": digest}))
            draft.replace(note)
        return digest

    def _folder(self, name: str) -> Path:
        for path in (self.root, self.root / name):  # `mode` does not reach what `parents` makes
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.root / name

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except AnaphoraError:
            raise
        except OSError as error:
            reason = f"{error.strerror}: {error.filename}" if error.filename else str(error)
            if error.errno in DISK_FULL:
                raise DownloadError(
                    f"No room to write under {self.root} ({reason}). Nothing was kept; "
                    "free some space, or set ANAPHORA_CACHE to a folder on a larger disk."
                ) from error
            raise ConfigError(
                f"The cache {self.root} cannot be written ({reason}). "
                "Set ANAPHORA_CACHE to a folder you can write to, or give a local model folder."
            ) from error

    @contextmanager
    def _lock(self, key: str, progress: Progress) -> Iterator[None]:
        with (self._folder("locks") / f"{key}.lock").open("w") as handle:
            if not _try_lock(handle.fileno()):
                progress("waiting for another process that fetches the same model", 0, None)
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _sweep(self, key: str) -> None:
        """Remove the work folders of dead processes: those of `key`, whose lock we hold, and those with a free lock."""
        for stale in self._folder("work").iterdir():
            owner = stale.name.rpartition("~")[0]
            if owner == key:
                shutil.rmtree(stale, ignore_errors=True)
                continue
            with (self._folder("locks") / f"{owner}.lock").open("w") as handle:
                if _try_lock(handle.fileno()):
                    shutil.rmtree(stale, ignore_errors=True)

    def _publish(self, fresh: Path, key: str, work: Path) -> Path:
        final = self._folder("models") / key
        for path in [*fresh.iterdir(), fresh]:
            _fsync(path)
        if final.exists():
            # A folder cannot replace a full one in one step: dying in between leaves none, never a mixed one.
            final.rename(work / "old")
        fresh.rename(final)
        _fsync(final.parent)
        return final


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_manifest(folder: Path, source: str, progress: Progress) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_file(path, "hashing", progress)}
        for path in sorted(folder.iterdir())
    }
    _write_file(folder / MANIFEST, json.dumps({"schema_version": 1, "source": source, "files": files}, indent=2) + "\n")


def _write_file(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _fsync(path)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
