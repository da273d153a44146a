"""What other ways of keeping blocks on a disk give, for ADR 6: LMDB, RocksDB, a file per block, slots in one file.

    python benchmarks/tiers_candidates.py [--folder DIR] [--block-bytes 368640] [--trials 3]

Needs lmdb and rocksdict, which nothing else here does. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tiers import seconds

from anaphora.tiers.memory import page_buffer


def candidates(folder: Path, size: int, trials: int) -> dict[str, dict[str, float]]:
    """GB/s of writing and of reading back in random order, nothing in the page cache; medians."""
    import lmdb  # type: ignore[import-not-found]
    from rocksdict import Options, Rdict  # type: ignore[import-not-found]

    count = (384 << 20) // size
    payload = page_buffer(size)
    payload[:] = os.urandom(size)
    names = [number.to_bytes(16, "big") for number in range(count)]
    order = names[1::2] + names[::2]
    found: dict[str, dict[str, list[float]]] = {}

    def uncache(path: Path) -> None:
        for file in [path] if path.is_file() else path.iterdir():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def note(store: str, what: str, took: float) -> None:
        found.setdefault(store, {}).setdefault(what, []).append(count * size / took / 1e9)

    def lmdb_store(path: Path) -> None:
        env = lmdb.open(str(path), map_size=1 << 30, sync=False)

        def put() -> None:
            for name in names:
                with env.begin(write=True) as transaction:
                    transaction.put(name, bytes(payload))

        def get() -> None:
            with env.begin(buffers=True) as transaction:
                for name in order:
                    payload[:] = transaction.get(name)

        note("LMDB, unsynced", "write", seconds(put))
        note("LMDB, unsynced", "write and sync", seconds(put) + seconds(lambda: env.sync(True)))
        env.close()
        uncache(path)
        env = lmdb.open(str(path), map_size=1 << 30)
        note("LMDB, unsynced", "read", seconds(get))
        env.close()

    def rocks_store(path: Path) -> None:
        options = Options(True)
        options.set_enable_blob_files(True)
        options.set_min_blob_size(4096)
        store = Rdict(str(path), options)

        def put() -> None:
            for name in names:
                store[name] = bytes(payload)
            store.flush()

        note("RocksDB, blob files", "write", seconds(put))
        store.close()
        uncache(path)
        store = Rdict(str(path), Options(True))

        def get() -> None:
            for name in order:
                payload[:] = store[name]

        note("RocksDB, blob files", "read", seconds(get))
        store.close()

    def file_store(path: Path) -> None:
        path.mkdir()

        def put() -> None:
            for name in names:
                fd = os.open(path / f"{name.hex()}.tmp", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
                os.pwrite(fd, payload, 0)
                os.close(fd)
                os.rename(path / f"{name.hex()}.tmp", path / name.hex())

        def get() -> None:
            for name in order:
                fd = os.open(path / name.hex(), os.O_RDONLY | os.O_DIRECT)
                os.preadv(fd, [payload], 0)
                os.close(fd)

        note("a file per block, direct", "write", seconds(put))
        note("a file per block, direct", "read", seconds(get))

    def one_file(path: Path, name: str, flags: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
        os.posix_fallocate(fd, 0, count * size)

        def put() -> None:
            for i in range(count):
                os.pwrite(fd, payload, i * size)

        note(name, "write", seconds(put))
        note(name, "rewrite", seconds(put))
        note(name, "rewrite and sync", seconds(put) + seconds(lambda: os.fsync(fd)))
        os.close(fd)
        uncache(path)
        fd = os.open(path, os.O_RDWR | flags)
        places = [int.from_bytes(number, "big") * size for number in order]
        note(name, "read", seconds(lambda: [os.preadv(fd, [payload], at) for at in places]))
        os.close(fd)

    def mapped(path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(fd, 0, count * size)
        area = memoryview(mmap.mmap(fd, count * size))

        def put() -> None:
            for at in range(0, count * size, size):
                area[at : at + size] = payload

        note("slots, mmap", "write", seconds(put))
        uncache(path)

        def get() -> None:
            for number in order:
                at = int.from_bytes(number, "big") * size
                payload[:] = area[at : at + size]

        note("slots, mmap", "read (partly cached: the mapping holds pages)", seconds(get))
        os.close(fd)

    stores: list[Callable[[Path], None]] = [
        lmdb_store,
        rocks_store,
        file_store,
        lambda path: one_file(path, "slots, direct", os.O_DIRECT),
        lambda path: one_file(path, "slots, buffered", 0),
        mapped,
    ]
    for _ in range(trials):
        for number, store in enumerate(stores):
            path = folder / f"candidate-{number}"
            store(path)
            path.unlink() if path.is_file() else shutil.rmtree(path)
    return {name: {what: statistics.median(all_) for what, all_ in kinds.items()} for name, kinds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--block-bytes", type=int, default=368_640, help="a multiple of 4096")
    parser.add_argument("--trials", type=int, default=3)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        print(json.dumps(candidates(folder, options.block_bytes, options.trials), indent=2))
    except ImportError as error:
        raise SystemExit(f"{error}; pip install lmdb rocksdict") from None
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
