"""MooncakeStore against a real master and a real holder of memory, each a process of its own."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from anaphora.tiers.memory import page_buffer
from anaphora.tiers.remote.deadline import Deadline
from anaphora.tiers.remote.mooncake_url import parse
from anaphora.tiers.remote.registry import open_remote
from anaphora.tiers.remote.tier import RemoteTier
from anaphora.tiers.remote.workers import NICENESS, Worker, Workers
from anaphora.tiers.store import Outcome, RemoteStore, StoreError
from support.remote import Mooncake, free_port, mooncake, until, why_no_mooncake, write
from support.stored_blocks import chain, payload, payloads, room

if not why_no_mooncake():
    from anaphora.tiers.remote.mooncake import MooncakeStore

pytestmark = pytest.mark.skipif(bool(why_no_mooncake()), reason=why_no_mooncake())

MOST_SECONDS = 10
"""Of one operation with a timeout of 0.5 s, on a machine that may be busy."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    with mooncake(tmp_path_factory.mktemp("mooncake"), 128 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def store(cluster: Mooncake) -> Iterator[RemoteStore]:
    store = open_remote(f"mooncake://{cluster.address}?timeout=10")
    yield store
    store.close()


def put(store: RemoteStore, key: bytes, data: bytes) -> bool:
    return write(store, [key], [[memoryview(data)]])[0]


def get(store: RemoteStore, key: bytes, size: int) -> bytes | int | None:
    room = bytearray(size)
    (length,) = store.read([key], [[memoryview(room)]])
    return bytes(room) if length == size else length


@pytest.mark.parametrize("size", [2, 100, 368_640, 9 << 20, 20 << 20])
def test_what_is_written_is_read(store: RemoteStore, size: int) -> None:
    key, data = os.urandom(16), os.urandom(size)
    assert store.contains([key]) == [False]
    assert get(store, key, size) is None
    assert put(store, key, data)
    assert store.contains([os.urandom(16), key]) == [False, True]
    assert get(store, key, size) == data
    assert get(store, key, size + 1) == size
    assert get(store, key, size // 2) == size
    store.delete([key, os.urandom(16)])
    assert store.contains([key]) == [False]


def test_a_batch_of_several_steps_gathered_and_scattered(store: RemoteStore) -> None:
    sizes = [3 << 20, 17, 6 << 20, 5 << 20, 1000, 7 << 20]
    keys, data = [os.urandom(16) for _ in sizes], [os.urandom(size) for size in sizes]
    assert write(store, keys, [[memoryview(value)[:10], memoryview(value)[10:]] for value in data]) == [True] * 6
    rooms = [[bytearray(7), bytearray(size - 7)] for size in sizes]
    missing = os.urandom(16)
    views = [[memoryview(room) for room in pair] for pair in rooms]
    assert list(store.read([*keys, missing], [*views, [memoryview(bytearray(5))]])) == [*sizes, None]
    assert [b"".join(pair) for pair in rooms] == data
    store.delete(keys)


def test_registered_memory_is_written_from_where_it_is(store: RemoteStore) -> None:
    memory = page_buffer(4 << 20)
    memory[:] = os.urandom(4 << 20)
    store.register(memory)
    keys = [os.urandom(16) for _ in range(4)]
    parts = [[memoryview(b"head"), memory[i << 20 : (i + 1) << 20]] for i in range(4)]
    assert write(store, keys, parts) == [True] * 4
    for i, key in enumerate(keys):
        assert get(store, key, (1 << 20) + 4) == b"head" + memory[i << 20 : (i + 1) << 20]
    store.delete(keys)


def test_more_steps_than_an_arena_has_parts(cluster: Mooncake) -> None:
    """Small parts, so that each is used several times; values of both kinds, copied and sent from where they lie."""
    store = MooncakeStore(parse(f"mooncake://{cluster.address}?timeout=10"), part_bytes=2 << 20)
    memory = page_buffer(24 << 20)
    memory[:] = os.urandom(24 << 20)
    store.register(memory)
    sizes = [1 << 20, 300_000, (2 << 20) - 4, 5, 700_000, 1 << 20, 40_000, 1_500_000, 2_000_000, 999] * 2
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    data = [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    keys = [os.urandom(16) for _ in sizes]
    assert all(write(store, keys, [[memoryview(b"head"), value] for value in data]))
    rooms = [bytearray(size + 4) for size in sizes]
    assert list(store.read(keys, [[memoryview(room)] for room in rooms])) == [size + 4 for size in sizes]
    assert rooms == [b"head" + value for value in data]
    store.delete(keys)
    store.close()


def test_a_value_that_no_arena_holds_is_refused(store: RemoteStore) -> None:
    huge = memoryview(bytearray((64 << 20) + 1))
    key = os.urandom(16)
    assert write(store, [key], [[huge]]) == [False]
    assert list(store.read([key], [[huge]])) == [None]


def test_a_key_asked_for_twice_is_read_twice(store: RemoteStore) -> None:
    keys, data = [os.urandom(16), os.urandom(16)], [os.urandom(1000), os.urandom(1000)]
    assert write(store, [*keys, keys[0]], [[memoryview(value)] for value in (*data, data[0])]) == [True] * 3
    rooms = [bytearray(1000) for _ in range(5)]
    asked = [1, 0, 0, 1, 0]
    assert list(store.read([keys[i] for i in asked], [[memoryview(room)] for room in rooms])) == [1000] * 5
    assert rooms == [data[i] for i in asked]
    store.delete(keys)


def test_two_servers_share_blocks(cluster: Mooncake, store: RemoteStore) -> None:
    one, two = RemoteTier(store), RemoteTier(open_remote(f"mooncake://{cluster.address}?timeout=10"))
    blocks = chain("mooncake", 12)
    assert one.save(blocks, payloads(blocks)) == [Outcome.OK] * 12
    views = room(12)
    assert two.load(blocks, views) == [Outcome.OK] * 12
    assert views == payloads(blocks)
    two.discard([block.key for block in blocks])
    assert one.contains([block.key for block in blocks]) == [False] * 12
    two.close()


def test_a_corrupt_value_is_removed_and_written_anew(store: RemoteStore) -> None:
    """Mooncake keeps the old bytes of a key that is put again, so what is corrupt must really go."""
    tier = RemoteTier(store)
    block = chain("corrupt", 1)[0]
    tier.save([block], payloads([block]))
    (size,) = store.read([block.key], [[memoryview(bytearray(1))]])
    assert size is not None
    good = get(store, block.key, size)
    assert isinstance(good, bytes)
    for at in (0, 20, 100, 210, size // 2, size - 1):
        bad = bytearray(good)
        bad[at] ^= 4
        store.delete([block.key])
        assert put(store, block.key, bytes(bad))
        assert tier.load([block], room(1)) == [Outcome.CORRUPT]
        assert tier.load([block], room(1)) == [Outcome.MISS]
        assert tier.save([block], payloads([block])) == [Outcome.OK]
        views = room(1)
        assert tier.load([block], views) == [Outcome.OK]
        assert views[0] == payload(block)


def test_a_full_store_says_no(tmp_path: Path) -> None:
    with mooncake(tmp_path, 16 << 20) as small:
        store = open_remote(f"mooncake://{small.address}?timeout=10")
        keys, data = [os.urandom(16) for _ in range(5)], os.urandom(5 << 20)
        # what was just read is under a lease, so it cannot be evicted for the next
        stored = [put(store, key, data) and get(store, key, len(data)) == data for key in keys]
        assert stored[0]
        assert not all(stored)
        assert get(store, keys[0], len(data)) == data
        store.close()


def test_no_master_costs_the_timeout() -> None:
    tier = RemoteTier(open_remote(f"mooncake://127.0.0.1:{free_port()}?timeout=0.5"))
    start = time.monotonic()
    assert tier.load(chain("none", 1), room(1)) == [Outcome.FAILED]
    assert tier.contains([chain("none", 1)[0].key]) == [False]
    assert time.monotonic() - start < MOST_SECONDS
    assert tier.stats().failed == 1
    tier.close()


def all_threads_stopped(pid: int) -> bool:
    """Linux: state T of every thread, the field behind the name in parentheses."""
    return all(
        path.read_text().rpartition(")")[2].split()[0] == "T" for path in Path(f"/proc/{pid}/task").glob("*/stat")
    )


def test_holder_and_master_that_stop_and_go(tmp_path: Path) -> None:
    with mooncake(tmp_path, 64 << 20) as cluster:
        tier = RemoteTier(open_remote(f"mooncake://{cluster.address}?timeout=0.5"))
        blocks = chain("stopped", 2)
        until(lambda: tier.save(blocks, payloads(blocks)) == [Outcome.OK] * 2, 20)
        for process in (cluster.holder, cluster.master):
            process.send_signal(signal.SIGSTOP)
            try:
                until(partial(all_threads_stopped, process.pid), 10)  # a thread may run on after the signal
                start = time.monotonic()
                views = room(2)
                assert Outcome.OK not in tier.load(blocks, views)
                assert time.monotonic() - start < MOST_SECONDS
            finally:
                process.send_signal(signal.SIGCONT)
            time.sleep(0.5)
            assert views == room(2), "what comes too late must not reach the caller's memory"
        start = time.monotonic()
        tier.close()
        assert time.monotonic() - start < MOST_SECONDS


def test_a_write_that_was_given_up_leaves_nothing(tmp_path: Path) -> None:
    """The memory that is sent may be changed by then. And who is asked for what is being written has a miss."""
    size = 16 << 20
    with mooncake(tmp_path, 128 << 20) as cluster:
        store = open_remote(f"mooncake://{cluster.address}?timeout=0.5")
        assert isinstance(store, MooncakeStore)
        tier, other = RemoteTier(store), RemoteTier(open_remote(f"mooncake://{cluster.address}?timeout=10"))
        blocks = chain("given up", 3)
        for each in (tier, other):
            until(lambda each=each: each.save(blocks[:1], payloads(blocks[:1])) == [Outcome.OK], 20)  # type: ignore[misc]
        memory = page_buffer(2 * size)
        tier.register(memory)
        cluster.holder.send_signal(signal.SIGSTOP)
        try:
            until(partial(all_threads_stopped, cluster.holder.pid), 10)
            assert tier.save(blocks[1:], [memory[:size], memory[size:]]) == [Outcome.FAILED] * 2
            assert other.load(blocks[1:2], room(1, size)) == [Outcome.MISS]
            memory[:] = b"x" * len(memory)
        finally:
            cluster.holder.send_signal(signal.SIGCONT)
        until(lambda: all(job.done for worker in store._workers._all for job in worker._begun), 20)
        assert other.load(blocks[1:], room(2, size)) == [Outcome.MISS] * 2

        cluster.holder.kill()
        assert other.load(blocks[:1], room(1)) == [Outcome.FAILED], "nobody can say whether it is there"
        tier.close()
        other.close()


def test_close_waits_for_a_call_that_was_given_up(tmp_path: Path) -> None:
    """Mooncake's client does not survive to be closed in the middle of one, nor does the process."""
    with mooncake(tmp_path, 64 << 20) as cluster:
        store = open_remote(f"mooncake://{cluster.address}?timeout=0.5")
        assert isinstance(store, MooncakeStore)
        tier = RemoteTier(store)
        blocks = chain("closed", 2)
        until(lambda: tier.save(blocks, payloads(blocks)) == [Outcome.OK] * 2, 20)
        cluster.holder.send_signal(signal.SIGSTOP)
        until(partial(all_threads_stopped, cluster.holder.pid), 10)
        assert Outcome.OK not in tier.load(blocks, room(2))
        assert not store._workers.ended(Deadline(0))
        goes_on = threading.Timer(0.5, cluster.holder.send_signal, [signal.SIGCONT])
        goes_on.start()
        start = time.monotonic()
        tier.close()
        assert time.monotonic() - start < 2 * MOST_SECONDS
        assert store._workers.ended(Deadline(0))
        goes_on.join()


def test_calls_given_up_are_not_begun_or_undone() -> None:
    at_it, go = threading.Barrier(2), threading.Event()
    done: list[str] = []
    worker = Worker("test", 1, 4096)
    begun = worker.start(lambda: at_it.wait(10) + go.wait(10), lambda: done.append("undone"))
    late = worker.start(lambda: done.append("late"), lambda: done.append("late undone"))
    at_it.wait(10)
    worker.give_up()
    last = worker.start(lambda: done.append("last"), lambda: done.append("last undone"))
    go.set()
    last.result(Deadline(5))
    assert begun.done
    assert late.done
    assert done == ["undone", "last"]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_a_process_that_is_nicer_than_its_workers_stays_so() -> None:
    """To be less nice is the superuser's right; others would lose the thread."""
    found = []

    def nice() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
        found.append(niceness_of(Worker("test", 1, 4096, niceness=10)))

    def niceness_of(worker: Worker) -> int:
        job = worker.start(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return job.result(Deadline(5))

    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness_of(Worker("test", 1, 4096)) == ours
    assert niceness_of(Workers("test", 1, 1, 4096, rest=1).lend(Deadline(1))) == max(ours, NICENESS)
    thread = threading.Thread(target=nice)
    thread.start()
    thread.join(10)
    assert found == [15]


def test_a_worker_that_is_stuck_rests_and_comes_back() -> None:
    workers = Workers("test", 1, 1, 4096, rest=0.2)
    go = threading.Event()
    worker = workers.lend(Deadline(1))
    job = worker.start(go.wait)
    with pytest.raises(TimeoutError, match="no answer within"):
        job.result(Deadline(0.05))
    worker.clean = False
    workers.give_back(worker)
    with pytest.raises(StoreError, match="earlier calls"):
        workers.lend(Deadline(5))
    go.set()
    until(lambda: job.done and worker.ready, 5)
    assert workers.lend(Deadline(1)) is worker
    with pytest.raises(StoreError, match="allow more"):
        workers.lend(Deadline(0.05))
    worker.clean = True
    workers.give_back(worker)
    assert workers.lend(Deadline(1)).start(lambda: 7).result(Deadline(1)) == 7
