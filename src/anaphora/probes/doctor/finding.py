"""A finding: what is wrong, how that is known, whose side it is, and the exact edit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Side = Literal["you", "server", "between"]
Severity = Literal["error", "warning"]
Status = Literal["ok", "finding", "failed"]
"""Of a check; "failed" stops those that need it."""

SIDES: dict[Side, str] = {
    "you": "your side",
    "server": "the server's side",
    "between": "something between you and the server",
}


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of one line of a file: `find` in it becomes `put`. A line left empty by that goes away."""

    line: int
    """Counted from 1."""
    find: str
    put: str
    safe: bool = False
    """--fix may write it: the meaning stays, or what goes away did nothing or stopped the start."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. Texts may hold secrets until the report redacts them."""

    code: str
    """Short and stable, for example "auth.expired" or "option.removed"."""
    side: Side
    what: str
    """What is wrong, one sentence."""
    fix: str
    """What to do, with the very text to type."""
    evidence: str = ""
    """What was seen that says so."""
    severity: Severity = "error"
    file: str | None = None
    line: int | None = None
    edit: Edit | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        edit = self.edit and {
            "line": self.edit.line, "find": self.edit.find, "put": self.edit.put, "safe": self.edit.safe
        }  # fmt: skip
        return {
            "code": self.code, "severity": self.severity, "side": self.side, "what": self.what, "fix": self.fix,
            "evidence": self.evidence, "file": self.file, "line": self.line, "edit": edit,
        }  # fmt: skip


@dataclass(slots=True)
class Diagnosis:
    """Everything one run found."""

    steps: list[Step] = field(default_factory=list)
    """Of the URL's chain, in order."""
    notes: list[str] = field(default_factory=list)
    """What is worth knowing and not wrong."""
    loose: list[Finding] = field(default_factory=list)
    """From files and logs."""
    read: list[str] = field(default_factory=list)
    """What was looked at, for the last sentence."""

    @property
    def findings(self) -> list[Finding]:
        """All, those of the chain first, each kind in the order found."""
        return [finding for step in self.steps for finding in step.findings] + self.loose

    @property
    def exit_code(self) -> int:
        """0 nothing, 1 findings, 3 where the other side could not be reached or failed."""
        if any(step.unreachable for step in self.steps):
            return 3
        return 1 if self.findings else 0


@dataclass(frozen=True, slots=True)
class Step:
    """One check of the chain as it went."""

    name: str
    title: str
    status: Status
    evidence: str
    findings: tuple[Finding, ...] = ()
    unreachable: bool = False
    """The other side gave no answer of its own."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the findings are listed elsewhere."""
        return {"name": self.name, "title": self.title, "status": self.status, "evidence": self.evidence,
                "seconds": round(self.seconds, 3)}  # fmt: skip
