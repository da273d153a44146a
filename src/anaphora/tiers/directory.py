"""The folder of a disk tier: one lock, and segments. Whoever writes into it holds the lock."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path

from anaphora.errors import ConfigError
from anaphora.tiers.segment import CorruptSegment, Segment
from anaphora.tiers.store import StoreError

log = logging.getLogger(__name__)
_LOCK = "lock"
_PID_BYTES = 16


class FolderInUse(ConfigError):
    """Another process writes into the folder."""


class DirectoryLock:
    """Holds a folder for this process until `close`; the system lets go of it when the process dies.

    Raises FolderInUse when another process holds it, ConfigError when the folder's lock is none of ours, StoreError
    when the folder cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise unusable(directory, error) from error
        try:
            if not _is_ours(os.pread(self._fd, _PID_BYTES + 1, 0)):
                os.close(self._fd)
                raise ConfigError(
                    f"{directory / _LOCK} is a file of another program; give the disk cache its own folder"
                )
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(self._fd, f"{os.getpid()}".encode().ljust(_PID_BYTES), 0)
        except OSError as error:
            holder = os.pread(self._fd, _PID_BYTES, 0).decode(errors="replace").strip()
            os.close(self._fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise FolderInUse(
                    f"{directory} is in use by process {holder or 'unknown'}. Give each server its own folder "
                    "(they can share blocks through --remote-cache), or stop that process first"
                ) from error
            raise unusable(directory, error) from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def unusable(directory: Path, error: OSError) -> StoreError:
    """What to say when the system refuses the folder."""
    return StoreError(
        f"{directory} cannot be used as a disk cache: {error.strerror}. Name a folder on a file system that this "
        "user can write to"
    )


def check_cache(directory: Path) -> None:
    """Raises ConfigError for what is no folder, or none of a disk cache: nothing is to be made or removed there."""
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a folder; name the one that --disk-cache was given")
    try:
        lock = directory / _LOCK
        if lock.is_file():
            with lock.open("rb") as file:
                ours = _is_ours(file.read(_PID_BYTES + 1))
        else:
            ours = bool(segment_paths(directory))
    except OSError as error:
        raise StoreError(f"{directory} cannot be read: {error.strerror}; let this user read it") from error
    if not ours:
        raise ConfigError(f"{directory} holds no disk cache; name the folder that --disk-cache was given")


def _is_ours(content: bytes) -> bool:
    """What a lock file holds: a process id, or nothing where its writer died before that."""
    return not content or (len(content) == _PID_BYTES and content.rstrip(b" ").isdigit())


def lock_bytes() -> int:
    """What the lock file takes of a tier's limit."""
    return _PID_BYTES


def segment_paths(directory: Path) -> list[Path]:
    """The segments' files, oldest first."""
    return sorted(directory.glob("seg-*.kv"))


def next_path(directory: Path, segments: list[Segment]) -> Path:
    """A name no segment has."""
    last = max((int(segment.path.stem.removeprefix("seg-"), 16) for segment in segments), default=0)
    return directory / f"seg-{last + 1:08x}.kv"


def open_segments(directory: Path) -> tuple[list[Segment], int]:
    """The segments that can be used, and how many could not and were removed. Under the lock. Raises OSError.

    What a killed process left half-made goes first, so that it never counts beside what is made anew.
    """
    for unfinished in directory.glob("seg-*.tmp"):
        unfinished.unlink()
    segments, removed = [], 0
    for path in segment_paths(directory):
        try:
            int(path.stem.removeprefix("seg-"), 16)
            segments.append(Segment.open(path))
        except (CorruptSegment, ValueError) as error:
            log.warning("%s is removed from the disk cache: %s", path, error)
            path.unlink()
            removed += 1
    return segments, removed
