"""A file under examination: its text, its values with the line each stands on, and the secrets found in it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anaphora.errors import ConfigError
from anaphora.probes.doctor.engine_line import Launch
from anaphora.probes.doctor.finding import Edit, Finding
from anaphora.probes.doctor.sayings import say

MAX_BYTES = 4 << 20

Path_ = tuple[str | int, ...]
"""Keys and indices from the top to a value."""


@dataclass(slots=True)
class Source:
    """One file. Linters add to the lower half."""

    path: Path
    text: str
    kind: str = "text"
    value: Any = None
    """As parsed; None where the kind has no structure."""
    where: dict[Path_, int] = field(default_factory=dict)
    """Line of each value."""

    findings: list[Finding] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    """To be redacted from everything that is shown; never shown."""
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Source:
        """Raises ConfigError."""
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ConfigError(
                    f"{path} has over {MAX_BYTES:,} bytes, too much for a configuration; logs go to --log"
                )
            return cls(path, path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; check the path") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not a text file; give a configuration file") from None

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    def say(
        self, code: str, line: int | None = None, *, evidence: str = "", edit: Edit | None = None, **values: object
    ) -> None:
        """Add a finding of this file."""
        self.findings.append(replace(say(code, evidence, **values), file=str(self.path), line=line, edit=edit))

    def line_of(self, *path: str | int) -> int | None:
        """Line of a value, or of the nearest thing around it."""
        while path:
            if path in self.where:
                return self.where[path]
            path = path[:-1]
        return None

    def edit(self, line: int | None, find: str, put: str, *, safe: bool = False) -> Edit | None:
        """An edit, if `find` really stands on that line."""
        if line is None or not find or find not in self.lines[line - 1]:
            return None
        return Edit(line, find, put, safe)


def toml_lines(text: str) -> dict[Path_, int]:
    """Line of each key of a TOML text, by headers and assignments; good enough for error messages."""
    where: dict[Path_, int] = {}
    table: Path_ = ()
    for number, line in enumerate(text.split("\n"), start=1):
        if header := re.match(r"\s*\[+([^\[\]]+)\]+", line):
            table = _dotted(header.group(1))
            where.setdefault(table, number)
        elif key := re.match(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"))*)\s*=", line):
            where.setdefault((*table, *_dotted(key.group(1))), number)
    return where


def _dotted(text: str) -> Path_:
    return tuple(part.strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[\w-]+", text))
