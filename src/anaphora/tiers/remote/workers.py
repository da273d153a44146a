"""Calls that cannot be cancelled, made bounded: a thread makes them, and whoever waits for it may stop waiting.

Each worker owns an arena, memory that only its own calls touch. A call that was given up may still write there, so
its worker rests (its arena with it) before it is used again. Arenas are never freed: a transfer that comes back
from the dead finds memory that nobody mistakes for something else.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from queue import Empty, LifoQueue, SimpleQueue
from typing import Any, Generic, TypeVar

from anaphora.tiers.memory import page_buffer
from anaphora.tiers.remote.deadline import Deadline
from anaphora.tiers.store import StoreError

T = TypeVar("T")
NICENESS = 10
"""Of the threads: Mooncake's client spins until a transfer is over, and what it waits for needs the core more."""


class Job(Generic[T]):
    """A call on its way."""

    def __init__(self, call: Callable[[], T], undo: Callable[[], object] | None) -> None:
        self.given_up = False
        """Nobody waits for it any more: it is not begun, or undone when it ends."""
        self._call = call
        self._undo = undo
        self._done = threading.Event()
        self._answer: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            if self.given_up:
                return
            self._answer = self._call()
            if self.given_up and self._undo is not None:
                self._undo()
        except BaseException as error:  # handed to whoever waits
            self._error = error
        finally:
            self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def failed(self) -> bool:
        return self.done and self._error is not None

    def ended(self, deadline: Deadline) -> bool:
        """Wait for its end; False when that is not before the deadline."""
        return self._done.wait(deadline.remaining())

    def result(self, deadline: Deadline) -> T:
        """Wait for the answer, or raise what the call raised. Raises TimeoutError after the deadline."""
        while not self.done:
            self._done.wait(deadline.left())
        if self._error is not None:
            raise self._error
        return self._answer  # type: ignore[return-value]


class Worker:
    """A few daemon threads and their arena. Calls begin in order, as many side by side as there are threads."""

    def __init__(self, name: str, threads: int, arena_bytes: int, niceness: int = 0) -> None:
        self.arena = page_buffer(arena_bytes)
        self.clean = True
        """Whether its calls ended well: nothing of them touches the arena any more."""
        self.rests_until = 0.0
        self._jobs: SimpleQueue[Job[Any]] = SimpleQueue()
        self._begun: list[Job[Any]] = []
        """Those that may not have ended."""
        for _ in range(threads):
            threading.Thread(target=self._work, args=(niceness,), name=name, daemon=True).start()

    @property
    def ready(self) -> bool:
        """Its calls have ended, and its rest."""
        return all(job.done for job in self._begun) and time.monotonic() >= self.rests_until

    def start(self, call: Callable[[], T], undo: Callable[[], object] | None = None) -> Job[T]:
        """`undo` is called after a call that was given up before it ended."""
        job = Job(call, undo)
        self._begun = [*(begun for begun in self._begun if not begun.done), job]
        self._jobs.put(job)
        return job

    def ended(self, deadline: Deadline) -> bool:
        """Wait for the end of its calls; False when that is not before the deadline."""
        return all(job.ended(deadline) for job in self._begun)

    def give_up(self) -> None:
        """Nobody waits for its calls any more."""
        for job in self._begun:
            job.given_up = True

    def _work(self, niceness: int) -> None:
        if sys.platform == "linux":  # where a thread has a niceness of its own
            thread = threading.get_native_id()
            if os.getpriority(os.PRIO_PROCESS, thread) < niceness:  # less nice only a superuser can be
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
        while True:
            self._jobs.get().run()


class Workers:
    """A few workers, lent to one caller at a time."""

    def __init__(self, name: str, count: int, threads: int, arena_bytes: int, rest: float) -> None:
        """`count` workers of so many threads. `rest`: seconds a worker is left alone after a call that may still
        touch its arena."""
        self._rest = rest
        self._all = [Worker(f"{name}-{number}", threads, arena_bytes, NICENESS) for number in range(count)]
        self._idle: LifoQueue[Worker] = LifoQueue()
        self._resting: list[Worker] = []
        self._lock = threading.Lock()
        for worker in self._all:
            self._idle.put(worker)

    @property
    def arenas(self) -> list[memoryview]:
        return [worker.arena for worker in self._all]

    def ended(self, deadline: Deadline) -> bool:
        """Wait for the end of all calls; False when that is not before the deadline."""
        return all(worker.ended(deadline) for worker in self._all)

    def lend(self, deadline: Deadline) -> Worker:
        """Raises StoreError when none is free in time, at once when all rest."""
        with self._lock:
            for worker in [worker for worker in self._resting if worker.ready]:
                self._resting.remove(worker)
                self._idle.put(worker)
            if len(self._resting) == len(self._all):
                raise StoreError("earlier calls still wait for the store")
        try:
            return self._idle.get(timeout=deadline.left())
        except Empty:
            raise StoreError(f"all {len(self._all)} workers are busy with other calls; allow more") from None

    def give_back(self, worker: Worker) -> None:
        if worker.clean:
            self._idle.put(worker)
            return
        worker.give_up()
        worker.rests_until = time.monotonic() + self._rest
        with self._lock:
            self._resting.append(worker)
