"""A lane: the worker threads of one tier. Loads go first and side by side; saves one at a time, in order, bounded."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from time import monotonic

log = logging.getLogger(__name__)
Job = Callable[[], None]


class Lane:
    """Thread-safe. Jobs report what they did themselves and do not raise; one that does is logged, not fatal.

    Loads are as many as the engine has blocks to load into, so they need no bound of their own. Saves keep their
    order because a full tier takes no block whose parent it has not got.
    """

    def __init__(self, name: str, threads: int, max_saves: int) -> None:
        self.max_saves = max_saves
        self._loads: deque[Job] = deque()
        self._saves: deque[tuple[Job, int]] = deque()
        self._saves_waiting = 0
        self.dropped = 0
        """Blocks whose save was refused because the lane was behind."""
        self._running = 0
        self._saving = False
        self._closed = False
        self._changed = Condition()
        self._threads = [Thread(target=self._work, name=f"tier-{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> tuple[int, int]:
        """(pieces of loads, blocks of saves) not begun."""
        return len(self._loads), self._saves_waiting

    def load(self, job: Job) -> bool:
        """Queue a load. False: the lane is closed."""
        with self._changed:
            if self._closed:
                return False
            self._loads.append(job)
            self._changed.notify()
            return True

    def save(self, job: Job, blocks: int) -> bool:
        """Queue a save of so many blocks. False: the lane is behind or closed; the save is dropped.

        A lane with nothing waiting takes one save of any size.
        """
        with self._changed:
            if self._closed or (self._saves_waiting and self._saves_waiting + blocks > self.max_saves):
                self.dropped += blocks
                return False
            self._saves.append((job, blocks))
            self._saves_waiting += blocks
            self._changed.notify()
            return True

    def drain(self, timeout: float) -> bool:
        """Wait until nothing waits or runs; False when it took longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(self._idle, timeout)

    def close(self, timeout: float) -> bool:
        """Take no more jobs and end the threads once the queued ones are done. False: some still run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end = monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _idle(self) -> bool:
        return not (self._loads or self._saves or self._running)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if not self._loads and (self._saving or not self._saves):
                    return
                is_save = not self._loads
                if is_save:
                    job, blocks = self._saves.popleft()
                    self._saves_waiting -= blocks
                    self._saving = True
                else:
                    job = self._loads.popleft()
                self._running += 1
            try:
                job()
            except Exception:
                log.exception("a job of a tier failed; this is a bug of Anaphora's")
            finally:
                with self._changed:
                    self._running -= 1
                    self._saving = self._saving and not is_save
                    self._changed.notify_all()

    def _has_work(self) -> bool:
        if self._loads or (self._saves and not self._saving):
            return True
        return self._closed and not self._saves  # the thread may end
