"""Start-up logs in tests/data/start_logs: excerpts in the formats that engines print."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "data" / "start_logs"


def start_log(name: str) -> str:
    """Text of one log, by its file's name without the ending."""
    return (_FOLDER / f"{name}.txt").read_text(encoding="utf-8")
