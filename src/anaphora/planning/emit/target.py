"""What every target is: a name, the engine it configures, and a text with the reason beside each value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from anaphora.planning.settings import PlanSettings

Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Line:
    """One option. `value` None: not set, only spoken of (a flag that is gone, or better left alone)."""

    key: str
    value: Scalar | None
    why: str


class Target(Protocol):
    """One file format of one engine."""

    name: str
    engine: str
    """A key of planning.engines.ENGINES."""

    def render(self, settings: PlanSettings) -> str:
        """The file's text, ending in a newline."""
        ...
