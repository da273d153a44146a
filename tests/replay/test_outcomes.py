"""Outcomes through the request log: what goes in comes out, but no text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from anaphora.explain.outcome import Cause, Difference, Miss, Outcome
from anaphora.replay.outcomes import log_outcome, read_outcomes
from anaphora.replay.readers.base import ReadReport
from anaphora.replay.readers.source import read_trace
from anaphora.replay.request_log import RequestLogWriter
from anaphora.types import BlockHash

TEXTS = {"before": "It is ", "mine": "Zebra 9", "theirs": "Zebra 3", "after": ". Be kind"}
MISS = Miss(Cause.DIVERGED, 20, 30, other_request="r-0", difference=Difference("text", exact=True, **TEXTS))
OUTCOME = Outcome(
    "r-1", 1700000000.5, 50, {"pool": 20}, {"ttft": 0.2, "e2e": 1.0}, MISS, output_tokens=7, finish_reason="stop"
)


def test_an_outcome_comes_back_without_its_texts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writer = RequestLogWriter(path, block_size=16)
    log_outcome(writer, OUTCOME, [BlockHash(bytes([n]) * 16) for n in range(3)])
    log_outcome(writer, replace(OUTCOME, request_id="r-2", miss=None, finish_reason=None), [BlockHash(b"x")] * 3)
    writer.close()
    assert OUTCOME.miss is MISS  # what GET /explain shows is left as it is
    assert not any(word in path.read_text() for word in TEXTS.values())
    report = ReadReport()
    first, second = read_outcomes(path, report)
    difference = Difference("text", exact=True)
    assert first == replace(OUTCOME, miss=replace(MISS, difference=difference))
    assert (second.request_id, second.miss, second.finish_reason) == ("r-2", None, "abort")
    assert [(r.input_length, r.output_length) for r in read_trace(path, ReadReport())] == [(50, 7), (50, 7)]
