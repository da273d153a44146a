"""Looking after a disk tier's folder without a server: survey, scrub, clear. Reading works beside a server too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from anaphora.tiers.directory import DirectoryLock, FolderInUse, check_cache, segment_paths
from anaphora.tiers.format import CorruptBlock, Header, check_payload, parse_header
from anaphora.tiers.record import Record
from anaphora.tiers.segment import CorruptSegment, Segment
from anaphora.tiers.store import StoreError


@dataclass(slots=True)
class SpaceSummary:
    """The blocks of one model in one form."""

    model: str
    codec: str
    space: str
    """Hexadecimal digest."""
    blocks: int = 0
    tokens: int = 0
    payload_bytes: int = 0
    file_bytes: int = 0
    oldest: int = 0
    """Seconds since 1970 when the first of the blocks was stored; 0 when there is none."""
    newest: int = 0


@dataclass(slots=True)
class Survey:
    """What a folder holds, by its tables; no block was read."""

    used_bytes: int
    held: bool
    """A server uses the folder now."""
    spaces: list[SpaceSummary]
    unreadable: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Scrub:
    """What reading and verifying every block gave."""

    blocks: int = 0
    payload_bytes: int = 0
    corrupt: list[str] = field(default_factory=list)
    """One line for each block or file that is damaged."""
    removed: bool = False
    """The damaged ones are gone; False: they stay, because the folder is held or cannot be written."""
    held: bool = False
    """A server uses the folder now, and drops damaged blocks when it reads them."""


def survey(directory: Path) -> Survey:
    """Raises ConfigError for what is no folder of a disk cache, StoreError when it cannot be read."""
    with _writable(directory) as (lock, held):
        if lock is not None:
            lock.close()  # a server may start meanwhile
        spaces: dict[bytes, SpaceSummary] = {}
        unreadable: dict[Path, str] = {}
        for segment in _segments(directory, unreadable):
            space = segment.space
            summary = spaces.setdefault(space.digest, SpaceSummary(space.model, space.codec, space.digest.hex()))
            summary.file_bytes += segment.file_bytes
            for record in segment.records():
                if record is not None:
                    _count(summary, record)
        used = sum(path.stat().st_size for path in _own_files(directory))
        ordered = sorted(spaces.values(), key=lambda summary: (summary.model, summary.codec, summary.space))
        return Survey(used, held, ordered, _lines(unreadable))


def scrub(directory: Path, progress: Callable[[int], None] = lambda blocks: None) -> Scrub:
    """Read and verify every block; remove the damaged ones where nobody else holds the folder. Raises as `survey`."""
    with _writable(directory) as (lock, held):
        found = Scrub(removed=lock is not None, held=held)
        unreadable: dict[Path, str] = {}
        for segment in _segments(directory, unreadable, write=lock is not None):
            for record, result in read_all(segment):
                if isinstance(result, CorruptBlock):
                    found.corrupt.append(f"{segment.path.name}, slot {record.slot}: {result}")
                    if lock is not None:
                        segment.wipe(record.slot)
                    continue
                found.blocks += 1
                found.payload_bytes += record.payload_bytes
                progress(found.blocks)
        found.corrupt += _lines(unreadable)
        for path in unreadable if lock is not None else ():
            path.unlink(missing_ok=True)
        return found


def clear(directory: Path, keep: Callable[[Segment, Record], bool]) -> int:
    """Remove the blocks that `keep` does not want, and files that hold nothing; the number of blocks removed.

    Raises ConfigError while a server holds the folder or when it is none, StoreError when it cannot be written.
    """
    check_cache(directory)
    lock = DirectoryLock(directory)
    removed = 0
    try:
        for segment in _segments(directory, {}, write=True):
            kept = 0
            for record in segment.records():
                if record is None:
                    continue
                if keep(segment, record):
                    kept += 1
                else:
                    segment.wipe(record.slot)
                    removed += 1
            if not kept:
                segment.path.unlink()
    except OSError as error:
        raise StoreError(f"{directory} cannot be cleared: {error.strerror}; let this user write there") from error
    finally:
        lock.close()
    return removed


def read_all(
    segment: Segment, wanted: Callable[[Record], bool] = lambda record: True
) -> Iterator[tuple[Record, tuple[Header, memoryview, memoryview] | CorruptBlock]]:
    """Each block with its header, the header's bytes and the payload, verified; or what is wrong with it.

    The memory is good until the next one. What a server rewrites meanwhile is left out.
    """
    for record in segment.records():
        if record is None or not wanted(record):
            continue
        try:
            raw, payload = segment.read_raw(record)
            header = parse_header(raw)
            check_payload(header, payload)
            if (header.key, header.parent, header.space) != (record.key, record.parent, segment.space.digest):
                raise CorruptBlock("the block is not the one its record names")
        except (CorruptBlock, OSError) as error:
            now = segment.record(record.slot)
            if now is not None and (now.key, now.stored_at) == (record.key, record.stored_at):
                yield record, error if isinstance(error, CorruptBlock) else CorruptBlock(f"cannot be read: {error}")
            continue
        yield record, (header, raw, payload)


@contextmanager
def _writable(directory: Path) -> Iterator[tuple[DirectoryLock | None, bool]]:
    """The folder's lock, or None; and whether that is because a server holds it. Else it may only be read."""
    check_cache(directory)
    lock, held = None, False
    try:
        lock = DirectoryLock(directory)
    except FolderInUse:
        held = True
    except StoreError:
        pass
    try:
        yield lock, held
    except OSError as error:
        raise StoreError(f"{directory} cannot be read: {error.strerror}; let this user read it") from error
    finally:
        if lock is not None:
            lock.close()


def _lines(unreadable: dict[Path, str]) -> list[str]:
    return [f"{path.name}: {why}" for path, why in unreadable.items()]


def _segments(directory: Path, unreadable: dict[Path, str], *, write: bool = False) -> Iterator[Segment]:
    """Each in turn, open; those that are damaged, and why, go into `unreadable`."""
    for path in segment_paths(directory):
        try:
            segment = Segment.open(path, write=write)
        except CorruptSegment as error:
            unreadable[path] = str(error)
            continue
        except FileNotFoundError:  # a server gave it up meanwhile
            continue
        try:
            yield segment
        finally:
            segment.close()


def _own_files(directory: Path) -> Iterator[Path]:
    yield from (path for path in directory.iterdir() if path.name == "lock" or path.name.startswith("seg-"))


def _count(summary: SpaceSummary, record: Record) -> None:
    summary.blocks += 1
    summary.tokens += record.num_tokens
    summary.payload_bytes += record.payload_bytes
    summary.oldest = min(summary.oldest or record.stored_at, record.stored_at)
    summary.newest = max(summary.newest, record.stored_at)
