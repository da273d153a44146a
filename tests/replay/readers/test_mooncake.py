"""Mooncake's lines become requests; what is wrong is counted, with its line."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from anaphora.blocks.eviction import make_policy
from anaphora.errors import InputError
from anaphora.replay.lru_curve import lru_curve
from anaphora.replay.readers.base import ReadReport, TraceRequest
from anaphora.replay.readers.mooncake import read_mooncake
from anaphora.replay.simulator import replay

GOOD = '{"timestamp": %s, "input_length": 700, "output_length": 5, "hash_ids": [%s]}\n'
TRACE = Path(os.environ.get("ANAPHORA_CONVERSATION_TRACE", "does-not-exist"))


def read(text: str, **options: Any) -> tuple[list[TraceRequest], ReadReport]:
    report = ReadReport()
    return list(read_mooncake(io.StringIO(text), report, **options)), report


def test_arrivals_are_the_trace_s_in_seconds() -> None:
    requests, report = read(GOOD % (5000, "1, 2") + "\n" + GOOD % (5250, "1, 3"))
    assert requests == [
        TraceRequest(5.0, 700, 5, [1, 2], 512),
        TraceRequest(5.25, 700, 5, [1, 3], 512),
    ]
    assert (report.lines, report.requests, report.num_malformed, report.out_of_order) == (3, 2, 0, 0)
    assert all(request.has_blocks for request in requests)
    assert [len(name) for name in requests[0].blocks(16)] == [16, 16]


def test_what_is_out_of_order_is_counted() -> None:
    requests, report = read(GOOD % (9000, "1, 2") + GOOD % (8000, "1, 3") + GOOD % (10000, "1, 4"))
    assert [request.arrival for request in requests] == [9.0, 8.0, 10.0]
    assert report.out_of_order == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "no JSON"),
        ("[1]", "not a JSON object"),
        (GOOD % (-1, "1, 2"), "timestamp is -1"),
        (GOOD % ("NaN", "1, 2"), "timestamp is nan"),
        (GOOD % ("true", "1, 2"), "timestamp is True"),
        (GOOD % (0, "1"), "700 tokens do not make 1 blocks"),
        (GOOD % (0, "1, -2"), "hash_ids is not a list"),
        (GOOD % (0, '1, "2"'), "hash_ids is not a list"),
        (GOOD % (0, "1, 1"), "names a block twice"),
        ((GOOD % (0, "1, 2")).replace("700", "700.5"), "input_length is 700.5; it must be a whole number"),
        ((GOOD % (0, "1, 2")).replace('"output_length": 5, ', ""), "output_length is None"),
    ],
)
def test_lines_that_cannot_be_used(line: str, why: str) -> None:
    text = GOOD % (0, "1, 2") + line.strip() + "\n" + GOOD % (9, "1, 2")
    requests, report = read(text)
    assert len(requests) == 2
    assert report.num_malformed == 1
    assert report.malformed[0][0] == 2
    assert why in report.malformed[0][1]
    with pytest.raises(InputError, match=r"line 2: .*leave out --strict"):
        read(text, strict=True)


def test_the_report_does_not_grow_without_bound() -> None:
    _, report = read("x\n" * 500)
    assert report.num_malformed == 500
    assert len(report.malformed) == ReadReport.KEPT


@pytest.mark.skipif(not TRACE.is_file(), reason="ANAPHORA_CONVERSATION_TRACE names no file (Mooncake's)")
def test_the_conversation_trace() -> None:
    with TRACE.open(encoding="utf-8") as source:
        requests = list(read_mooncake(source, report := ReadReport(), strict=True))
    assert (report.requests, report.out_of_order) == (12_031, 0)
    curve = lru_curve(requests)
    assert curve.blocks == 288_500
    assert [round(curve.hits(size)[0] / curve.blocks, 3) for size in (1000, 5000, 10000)] == [0.045, 0.112, 0.212]
    assert round(curve.ceiling[0] / curve.blocks, 3) == 0.366
    for size, least in ((1000, 0.068), (5000, 0.15), (10000, 0.215)):
        assert replay(requests, size, make_policy("hazard")).block_hit_rate > least
