"""For tests whose subject is time itself: a shared machine may stall for seconds in the middle of one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def may_stall(test: Callable[P, None]) -> Callable[P, None]:
    """Run `test` again, three times in all, when it fails: a fault fails each time, a stall of the machine does not."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(2):
            try:
                return test(*args, **kwargs)
            except AssertionError:
                continue
        return test(*args, **kwargs)

    return run
