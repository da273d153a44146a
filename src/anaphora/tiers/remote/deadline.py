"""How long one operation may take: a fixed part, and a part for its bytes."""

from __future__ import annotations

import time

SLOWEST_BYTES_PER_SECOND = 32 << 20
"""A store slower than this is as good as down: recomputing is the better choice on any machine."""


class Deadline:
    """A moment that all the waiting of one operation shares, however many times it waits."""

    def __init__(self, seconds: float, nbytes: int = 0) -> None:
        """`seconds` for the operation as such, more for the `nbytes` it moves."""
        self.seconds = seconds + nbytes / SLOWEST_BYTES_PER_SECOND
        self._end = time.monotonic() + self.seconds

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    def left(self) -> float:
        """Seconds left. Raises TimeoutError when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no answer within {self.seconds:.1f} s")
        return left

    def remaining(self) -> float:
        """Seconds left, 0 when there are none."""
        return max(0.0, self._end - time.monotonic())
