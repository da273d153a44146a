"""Small tools of the readers of start-up logs."""

from __future__ import annotations

import re
from collections.abc import Callable

from anaphora.planning.engine_report import GIB, MIB

_UNITS = {"GIB": GIB, "GB": GIB, "MIB": MIB, "MB": MIB, "KIB": 1024, "KB": 1024, "B": 1}
"""Engines that print GB mean GiB."""
NUMBER = r"(-?[\d,]+(?:\.\d+)?)"


class Log:
    """A log's text and how to find figures in it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def every(self, pattern: str) -> list[re.Match[str]]:
        """All matches, in order."""
        return list(re.finditer(pattern, self.text))

    def word(self, pattern: str) -> str | None:
        """The first group of the first match."""
        found = re.search(pattern, self.text)
        return found[1] if found else None

    def number(self, pattern: str, choose: Callable[[list[float]], float] = max) -> float | None:
        """One number of all matches' first groups (ranks print the same line)."""
        values = [to_number(found[1]) for found in self.every(pattern)]
        return choose(values) if values else None

    def whole(self, pattern: str, choose: Callable[[list[float]], float] = max) -> int | None:
        """`number`, as an int."""
        value = self.number(pattern, choose)
        return None if value is None else int(value)

    def size(self, pattern: str, choose: Callable[[list[float]], float] = max) -> int | None:
        """Bytes: the pattern's groups are a number and a unit."""
        values = [size(found[1], found[2]) for found in self.every(pattern)]
        return None if not values else int(choose([float(value) for value in values]))


def to_number(text: str) -> float:
    """'1,234.5' -> 1234.5."""
    return float(text.replace(",", ""))


def size(number: str, unit: str) -> int:
    """('1.5', 'GiB') -> bytes."""
    return round(to_number(number) * _UNITS[unit.upper()])


def first(values: list[float]) -> float:
    """The first rank's."""
    return values[0]


def known(**parts: int | None) -> dict[str, int]:
    """Parts that were found; an underscore in a name stands for a space."""
    return {name.replace("_", " "): value for name, value in parts.items() if value is not None}
