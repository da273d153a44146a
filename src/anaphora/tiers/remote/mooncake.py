"""Blocks in Mooncake Store (https://github.com/kvcache-ai/Mooncake): other machines' memory, over TCP or RDMA.

    mooncake://MASTER:50051?protocol=tcp&segment=0&timeout=2      all options: mooncake_url.py

Values are read by get_into into registered arenas, some parts of an arena being filled while another is copied out: a
transfer that outlives its call (seen with a holder that stops and goes on, long after the call had returned an error)
must not find a block of the pool under its pen. Values are written by put_from straight out of registered memory,
which lives as long as the process, and through an arena out of any other.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

# Mooncake's client reads its settings from the environment. Its own patience (a minute, retries of retries) is cut to
# what lets a worker go soon after its caller has left; whoever has set a variable means it.
for _variable, _value in {
    "MC_LOG_LEVEL": "ERROR",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
}.items():
    os.environ.setdefault(_variable, _value)

from mooncake.store import MooncakeDistributedStore  # noqa: E402

from anaphora.tiers.memory import copy  # noqa: E402
from anaphora.tiers.remote.deadline import Deadline  # noqa: E402
from anaphora.tiers.remote.mooncake_url import MooncakeOptions, parse  # noqa: E402
from anaphora.tiers.remote.workers import Job, Worker, Workers  # noqa: E402
from anaphora.tiers.store import StoreError  # noqa: E402

PART_BYTES = 64 << 20
"""Of an arena; the longest value there can be. Memory is taken as far as it is used."""
CALLS = 2
"""On their way at a time: the master answers one while the other's bytes move."""
STEP_BYTES = 24 << 20
"""What one call moves."""
COPIED_BYTES = 512 << 10
"""A value shorter than this is copied, even out of registered memory, so that it is one piece: a second, its header,
costs 70 microseconds, the copy of a megabyte 160."""
LOCAL_BUFFER_BYTES = 16 << 20
REST_SECONDS = 30.0
CLOSE_SECONDS = 10.0
"""Longer than a call takes that Mooncake's client gives up by itself; see the environment above."""
NOT_READY, NOT_FOUND, LEASE_EXPIRED, NO_ROOM, LONGER = OF_ONE_KEY = -703, -704, -707, -200, -600
"""Not ready: somebody else is writing it."""
TRANSFER_FAILED = range(-899, -799)


def open_store(url: str) -> MooncakeStore:
    """The store behind `url`; connects when first asked. Raises ConfigError for a wrong URL."""
    return MooncakeStore(parse(url))


class MooncakeStore:
    """A RemoteStore. Thread-safe: `workers` operations at a time, the rest wait for their turn."""

    def __init__(self, options: MooncakeOptions, *, part_bytes: int = PART_BYTES, rest: float = REST_SECONDS) -> None:
        self._options = options
        self._part = part_bytes
        self._workers = Workers("mooncake", options.workers, CALLS, (CALLS + 1) * part_bytes, rest)
        self._connector = Worker("mooncake-connect", 1, 0)
        self._connecting: Job[Any] | None = None
        self._memories: list[memoryview] = []
        """To be registered; only the connector's thread takes them out."""
        self._registered: list[tuple[int, int, memoryview]] = []
        """Start, end and a reference that keeps the memory alive."""
        self._lock = threading.Lock()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        deadline = Deadline(self._options.timeout)
        client = self._client(deadline)
        names = [_name(key) for key in keys]
        with self._lent(deadline) as worker:
            codes = worker.start(lambda: client.batch_is_exist(names)).result(deadline)
        if any(code < 0 for code in codes):
            raise self._error(min(codes))
        return [code == 1 for code in codes]

    def read(self, keys: Sequence[bytes], into: Sequence[Sequence[memoryview]]) -> Iterator[int | None]:
        sizes = [_size(views) for views in into]
        rooms = [size if size <= self._part else 1 for size in sizes]  # what no part holds was never written
        deadline = Deadline(self._options.timeout, sum(rooms))
        client = self._client(deadline)
        codes: list[int] = []
        with self._lent(deadline) as worker:
            base = _address(worker.arena)

            def start(run: Sequence[int], places: Sequence[int]) -> Job[list[int]]:
                names, lengths = [_name(keys[index]) for index in run], [rooms[index] for index in run]
                return worker.start(lambda: client.batch_get_into(names, [base + place for place in places], lengths))

            for run, places, answers in self._pipeline(keys, rooms, start, deadline):
                codes += answers
                self._check(codes, worker)
                for index, place, code in zip(run, places, answers, strict=True):
                    if code == sizes[index]:
                        _scatter(worker.arena[place : place + code], into[index])
                    elif code == LONGER:
                        name = _name(keys[index])
                        code = worker.start(lambda name=name: client.get_size(name)).result(deadline)  # type: ignore[misc]
                    yield code if code >= 0 else None

    def write(self, keys: Sequence[bytes], sizes: Sequence[int], parts: Sequence[Sequence[memoryview]]) -> list[bool]:
        deadline = Deadline(self._options.timeout, sum(sizes))
        client = self._client(deadline)
        codes = [NO_ROOM] * len(keys)
        with self._lent(deadline) as worker:

            def start(run: Sequence[int], places: Sequence[int]) -> Job[list[int]]:
                gathered = [self._gather(parts[index], worker.arena, at) for index, at in zip(run, places, strict=True)]
                names = [_name(keys[index]) for index in run]
                addresses = [[where for where, _ in pieces] for pieces in gathered]
                lengths = [[length for _, length in pieces] for pieces in gathered]
                # Whoever does not wait for the end may change the memory that is being sent.
                return worker.start(
                    lambda: client.batch_put_from_multi_buffers(names, addresses, lengths),
                    lambda: client.batch_remove(names, True),
                )

            for run, _, answers in self._pipeline(keys, sizes, start, deadline):
                for index, code in zip(run, answers, strict=True):
                    codes[index] = code
            self._check(codes, worker)
        return [code == 0 for code in codes]

    def delete(self, keys: Sequence[bytes]) -> None:
        deadline = Deadline(self._options.timeout)
        client = self._client(deadline)
        names = [_name(key) for key in keys]
        with self._lent(deadline) as worker:
            # By force: a value that was just read is under a lease for seconds, and would stay.
            worker.start(lambda: client.batch_remove(names, True)).result(deadline)

    def register(self, memory: memoryview) -> None:
        """Where the store cannot be reached now, the memory is registered as soon as it can."""
        self._memories.append(memory)
        deadline = Deadline(self._options.timeout)
        client = self._client(deadline)
        self._waited(self._connector.start(lambda: self._register_memories(client)), deadline)

    def close(self) -> None:
        """Waits for calls that were given up: a client that is closed in the middle of one takes the process with it.
        What has not ended after CLOSE_SECONDS ends with the process."""
        with self._lock:
            job, self._connecting = self._connecting, None
        if job is not None and job.done and self._workers.ended(Deadline(CLOSE_SECONDS)):
            deadline = Deadline(self._options.timeout)
            with suppress(Exception):
                client = job.result(deadline)
                self._connector.start(client.close).result(deadline)

    def _client(self, deadline: Deadline) -> Any:
        """The connected client. Connecting goes on when the deadline is over, and the next operation finds it done."""
        with self._lock:
            if self._connecting is None or self._connecting.failed:
                self._connecting = self._connector.start(self._connect)
            job = self._connecting
        return self._waited(job, deadline)

    def _connect(self) -> Any:
        options = self._options
        client = MooncakeDistributedStore()
        code = client.setup(
            options.local_host(),
            options.metadata,
            options.segment,
            LOCAL_BUFFER_BYTES,
            options.protocol,
            options.devices,
            options.master,
            tenant_id=options.tenant,
        )
        if code == 0:
            for arena in self._workers.arenas:
                code = code or client.register_buffer(_address(arena), arena.nbytes)
        if code != 0:
            client.close()
            raise StoreError(
                f"cannot join the Mooncake store of {options.master} (code {code}); is mooncake_master running there, "
                f"and is metadata={options.metadata} what its other clients use?"
            )
        self._register_memories(client)
        return client

    def _register_memories(self, client: Any) -> None:
        while self._memories:
            memory = self._memories.pop()
            start = _address(memory)
            if client.register_buffer(start, memory.nbytes) == 0:
                self._registered.append((start, start + memory.nbytes, memory))

    @contextmanager
    def _lent(self, deadline: Deadline) -> Iterator[Worker]:
        worker = self._workers.lend(deadline)
        worker.clean = True
        try:
            yield worker
        except TimeoutError as error:
            worker.clean = False
            raise StoreError(f"{self._options.master}: {error}") from None
        except BaseException:
            worker.clean = worker.clean and worker.ready
            raise
        finally:
            self._workers.give_back(worker)

    def _waited(self, job: Job[Any], deadline: Deadline) -> Any:
        try:
            return job.result(deadline)
        except (TimeoutError, OSError) as error:
            raise StoreError(f"{self._options.master}: {error}") from None

    def _runs(self, keys: Sequence[bytes], sizes: Sequence[int]) -> Iterator[list[int]]:
        """Indices, in calls of about STEP_BYTES; values that no part of an arena holds are left out. No call has a key
        twice: Mooncake would fill one of the two places, and say that it filled both."""
        run: list[int] = []
        known: set[bytes] = set()
        total = 0
        for index, size in enumerate(sizes):
            if size > self._part:
                continue
            if run and (total + size > min(STEP_BYTES, self._part) or keys[index] in known):
                yield run
                run, known, total = [], set(), 0
            run.append(index)
            known.add(keys[index])
            total += size
        if run:
            yield run

    def _pipeline(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        start: Callable[[Sequence[int], Sequence[int]], Job[list[int]]],
        deadline: Deadline,
    ) -> Iterator[tuple[Sequence[int], Sequence[int], list[int]]]:
        """Indices, places in the arena and answers of one call after another. While they are dealt with, CALLS others
        are on their way, each in its own part of the arena."""
        begun: deque[tuple[Sequence[int], Sequence[int], Job[list[int]]]] = deque()
        for number, run in enumerate(self._runs(keys, sizes)):
            if len(begun) > CALLS:
                yield _answered(*begun.popleft(), deadline)
            places, at = [], number % (CALLS + 1) * self._part
            for index in run:
                places.append(at)
                at += sizes[index]
            begun.append((run, places, start(run, places)))
        while begun:
            yield _answered(*begun.popleft(), deadline)

    def _gather(self, views: Sequence[memoryview], arena: memoryview, at: int) -> list[tuple[int, int]]:
        """Address and length of each piece of memory to be sent: where it is, or where its copy is, in the arena from
        `at` on."""
        pieces: list[tuple[int, int]] = []
        small = _size(views) < COPIED_BYTES
        for view in views:
            if small or not self._is_registered(view):
                copy(arena[at : at + len(view)], view)
                view = arena[at : at + len(view)]
                at += len(view)
            start, length = _address(view), len(view)
            if pieces and sum(pieces[-1]) == start:
                start, before = pieces.pop()
                length += before
            pieces.append((start, length))
        return pieces

    def _is_registered(self, view: memoryview) -> bool:
        if view.readonly or not self._registered:
            return False
        start = _address(view)
        return any(low <= start and start + len(view) <= high for low, high, _ in self._registered)

    def _check(self, codes: Sequence[int], worker: Worker) -> None:
        """Raises StoreError when every key met an error that is not about the key."""
        if any(code in TRANSFER_FAILED for code in codes):
            worker.clean = False
        errors = [code for code in codes if code < 0 and code not in OF_ONE_KEY]
        if codes and len(errors) == len(codes):
            raise self._error(errors[0])

    def _error(self, code: int) -> StoreError:
        return StoreError(f"{self._options.master}: Mooncake says {code}: its master or a holder of data failed")


def _answered(
    run: Sequence[int], places: Sequence[int], job: Job[list[int]], deadline: Deadline
) -> tuple[Sequence[int], Sequence[int], list[int]]:
    return run, places, job.result(deadline)


def _name(key: bytes) -> str:
    return f"anaphora:{key.hex()}"


def _size(views: Sequence[memoryview]) -> int:
    return sum(map(len, views))


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _scatter(value: memoryview, views: Sequence[memoryview]) -> None:
    at = 0
    for view in views:
        copy(view, value[at : at + len(view)])
        at += len(view)
