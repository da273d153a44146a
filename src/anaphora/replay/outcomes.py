"""Outcomes of requests, into a request log (replay/request_log.py) and out of it; never a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anaphora.errors import InputError
from anaphora.explain.outcome import Outcome, as_dict, from_dict
from anaphora.replay.readers.base import BadLine, ReadReport, json_row
from anaphora.replay.readers.source import open_lines
from anaphora.replay.request_log import MARK, VERSION, RequestLogWriter, RequestRecord
from anaphora.types import BlockHash

_NAMES = {
    "input_length": "prompt_tokens",
    "output_length": "output_tokens",
    "hit": "reused",
    "outcome": "finish_reason",
}
"""Keys of the log that an Outcome calls otherwise."""


def log_outcome(writer: RequestLogWriter, outcome: Outcome, blocks: Sequence[BlockHash]) -> None:
    """Leave a complete outcome for the log, without text, also where the server keeps text for GET /explain.

    `blocks`: the hashes of the prompt's full blocks. Immediate; never raises for what the disk does.
    """
    miss = outcome.miss
    if miss is not None and (seen := miss.difference) is not None:
        seen = replace(seen, before=None, mine=None, theirs=None, after=None)
        outcome = replace(outcome, miss=replace(miss, difference=seen))
    facts = as_dict(outcome)
    writer.write(
        RequestRecord(
            time=outcome.time,
            input_length=outcome.prompt_tokens,
            output_length=outcome.output_tokens,
            blocks=blocks,
            hit=outcome.reused,
            outcome=outcome.finish_reason or "abort",
            ttft=outcome.seconds.get("ttft"),
            e2e=outcome.seconds.get("e2e"),
            more={name: facts[name] for name in ("request_id", "miss", "waited_for", "pinned_tokens", "seconds")},
        )
    )


def read_outcomes(path: Path, report: ReadReport) -> Iterator[Outcome]:
    """In the log's order, oldest first ("-": stdin). Lines that cannot be used are skipped and noted in `report`.

    Raises InputError: the file cannot be read, or is no such log.
    """
    begun = False
    with open_lines(path) as lines:
        for number, line in enumerate(lines, 1):
            report.lines += 1
            if not line.strip():
                continue
            try:
                row = json_row(line)
                if MARK in row:
                    begun = True
                    _check_version(row)
                    continue
                if begun:
                    outcome = _outcome(row)
                    report.requests += 1
                    yield outcome
            except BadLine as error:
                report.reject(number, str(error), strict=False)
            if not begun:
                break
    if not begun:
        raise InputError(
            f"{path} is no request log of Anaphora's; give the file of `anaphora serve --request-log FILE`"
        )


def _check_version(row: dict[str, Any]) -> None:
    if row[MARK] != VERSION:
        raise BadLine(f"version {row[MARK]!r} of the log; this Anaphora reads version {VERSION}")


def _outcome(row: dict[str, Any]) -> Outcome:
    facts = {_NAMES.get(name, name): value for name, value in row.items()}
    try:
        return from_dict({"seconds": {}, **facts})
    except ValueError as error:
        raise BadLine(str(error)) from None
