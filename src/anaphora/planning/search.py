"""One binary search that every engine's memory model shares."""

from __future__ import annotations

from collections.abc import Callable


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `limit` that fits, 0 when not even 1 does. `fits` must not rise again."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
