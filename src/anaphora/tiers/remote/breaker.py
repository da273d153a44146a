"""A circuit breaker: a store that is down costs its timeout a few times, then nothing until it is tried again.

        `failures` in a row                    the pause is over
    closed ----------------> open  -------------------------------> half open (one caller tries)
      ^                       ^                                       |     |
      |                       +------- it failed: twice the pause ----+     |
      +------------------------------- it succeeded ------------------------+

Source: Nygard, "Release It!", the pattern of that name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum


class Circuit(Enum):
    """Whether the store is asked; the value is what metrics call it."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Thread-safe. Ask `allows` before every call and report its end with `succeeded` or `failed`."""

    def __init__(
        self,
        *,
        failures: int = 3,
        pause: float = 1.0,
        longest_pause: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`failures` in a row open the circuit for `pause` seconds, twice as long after every failed try."""
        self._limit = failures
        self._first_pause = pause
        self._longest_pause = longest_pause
        self._clock = clock
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._pause = pause
        self._retry_at: float | None = None
        """When the next caller may try; None: the circuit is closed."""
        self._trying = False

    @property
    def state(self) -> Circuit:
        with self._lock:
            if self._retry_at is None:
                return Circuit.CLOSED
            return Circuit.HALF_OPEN if self._trying else Circuit.OPEN

    def allows(self) -> bool:
        """Whether to call the store now. In a half-open circuit one caller gets True, and owes the report.

        A caller that never reports costs one pause: then the next may try.
        """
        with self._lock:
            if self._retry_at is None:
                return True
            now = self._clock()
            if now < self._retry_at:
                return False
            self._trying = True
            self._retry_at = now + self._pause
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._in_a_row = 0
            self._pause = self._first_pause
            self._retry_at = None
            self._trying = False

    def failed(self) -> None:
        with self._lock:
            self._in_a_row += 1
            if self._retry_at is None:
                if self._in_a_row < self._limit:
                    return
            elif self._trying:
                self._pause = min(2 * self._pause, self._longest_pause)
            else:
                return  # a call that began before the circuit opened
            self._trying = False
            self._retry_at = self._clock() + self._pause
