"""Reuse times, depths, working sets and shared prefixes, by hand."""

from __future__ import annotations

import pytest

from anaphora.replay.profile import SharedPrefix, TraceProfile
from anaphora.replay.synthetic import GENERATORS


def example() -> TraceProfile:
    result = TraceProfile()
    for arrival, prompt in ((0.0, "abc"), (4.0, "abd"), (6.0, "abd"), (10.0, "x")):
        result.request([prompt[: i + 1] for i in range(len(prompt))], arrival)
    return result


def test_reuse_and_depth() -> None:
    result = example()
    assert (result.requests, result.blocks, result.unique_blocks) == (4, 10, 5)
    assert result.reuse_seconds == {4.0: 2, 2.0: 3}
    assert result.by_depth == {0: (4, 2), 1: (3, 2), 2: (3, 1)}


def test_the_working_set() -> None:
    result = example()
    # a and b are in the window for 1 s after each of 3 uses, abc 1, abd 2, x 0 (the trace ends)
    assert result.working_set(1.0) == pytest.approx((3 + 3 + 1 + 2) / 10)
    assert result.working_set(1e9) == pytest.approx((10 + 10 + 10 + 6) / 10)


def test_the_top_prefixes_end_where_uses_part() -> None:
    assert example().top_prefixes(9) == [SharedPrefix(3, 2, "ab"), SharedPrefix(2, 3, "abd")]
    assert example().top_prefixes(1) == [SharedPrefix(3, 2, "ab")]


def test_a_trace_at_one_instant() -> None:
    result = TraceProfile()
    result.request(["a", "b"], 0.0)
    assert result.working_set(5.0) == 2.0


def test_of_a_stream() -> None:
    result = TraceProfile()
    for request in GENERATORS["chat"](300, 1):
        result.request(request.blocks(512), request.arrival)
    assert sum(uses for uses, _ in result.by_depth.values()) == result.blocks
    assert sum(again for _, again in result.by_depth.values()) == result.blocks - result.unique_blocks
