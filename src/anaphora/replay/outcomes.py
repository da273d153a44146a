"""Why requests missed, out of a request log (replay/request_log.py) that a server wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anaphora.errors import InputError
from anaphora.explain.outcome import Outcome, from_dict
from anaphora.replay.readers.base import BadLine, ReadReport, json_row
from anaphora.replay.readers.source import open_lines
from anaphora.replay.request_log import MARK, VERSION

_NAMES = {
    "input_length": "prompt_tokens",
    "output_length": "output_tokens",
    "hit": "reused",
    "outcome": "finish_reason",
}
"""Keys of the log that an Outcome calls otherwise."""


def read_outcomes(path: Path, report: ReadReport, *, strict: bool = False) -> Iterator[Outcome]:
    """In the log's order, oldest first ("-": stdin). Lines that cannot be used are skipped and noted in `report`.

    Raises InputError: the file cannot be read, is no such log, and with `strict` for the first bad line.
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
                report.reject(number, str(error), strict=strict)
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
