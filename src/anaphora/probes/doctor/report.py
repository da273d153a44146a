"""What a person or a program reads of a diagnosis; nothing leaves without `redact`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anaphora
from anaphora.probes.doctor.finding import SIDES, Diagnosis, Finding
from anaphora.probes.doctor.visit import Visit
from anaphora.probes.html import Section, Tone, bullets, page, paragraph, preformatted, table
from anaphora.probes.redact import redact
from anaphora.probes.report import SCHEMA_VERSION

_MARKS = {"ok": "ok", "finding": "!!", "failed": "XX"}


@dataclass(slots=True)
class Report:
    """One run of the doctor, ready to be shown."""

    diagnosis: Diagnosis
    visit: Visit | None = None
    secrets: list[str] = field(default_factory=list)
    interrupted: bool = False

    def clean(self, text: str) -> str:
        """Redacted: the endpoint's secrets, those of the files, whatever looks like one, and the user's home folder."""
        hidden = list(self.secrets)
        if self.visit is not None:
            hidden += [self.visit.api_key or "", *_header_values(self.visit.headers)]
            text = self.visit.endpoint.redact(text)
        return redact(text, [secret for secret in hidden if secret]).replace(str(Path.home()), "~")

    def verdict(self) -> str:
        """The last sentence: whose side, what to do."""
        found = self.diagnosis.findings
        looked = ", ".join(self.diagnosis.read) or "nothing"
        if self.interrupted and not found:
            return f"Interrupted: nothing wrong up to there ({looked})."
        if not found:
            return f"Nothing is wrong: {looked}."
        first = next((finding for finding in found if finding.severity == "error"), found[0])
        more = f" ({len(found) - 1} more above)" if len(found) > 1 else ""
        return self.clean(f"It is {SIDES[first.side]}: {_sentence(first.what)} Do this: {first.fix}{more}")

    def as_json(self) -> str:
        """Pretty JSON with a versioned schema, redacted."""
        report = {
            "schema_version": SCHEMA_VERSION,
            "command": "doctor",
            "anaphora_version": anaphora.__version__,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "interrupted": self.interrupted,
            "endpoint": self.visit.endpoint.api_base if self.visit else None,
            "engine": self.visit.engine.as_dict() if self.visit else None,
            "model": (self.visit.chosen or None) if self.visit else None,
            "steps": [step.as_dict() for step in self.diagnosis.steps],
            "findings": [finding.as_dict() for finding in self.diagnosis.findings],
            "notes": self.diagnosis.notes,
            "verdict": self.verdict(),
            "exit_code": self.diagnosis.exit_code,
        }
        return json.dumps(_each_text(report, self.clean), indent=2, ensure_ascii=False, allow_nan=False)

    def as_text(self) -> str:
        """For a terminal or a pipe."""
        steps = self.diagnosis.steps
        width = max((len(step.title) for step in steps), default=0)
        lines = [f"[{_MARKS[step.status]}] {step.title:<{width}}  {step.evidence}" for step in steps]
        if lines and self.diagnosis.findings:
            lines.append("")
        for number, finding in enumerate(self.diagnosis.findings, start=1):
            lines += [*_finding_lines(number, finding), ""]
        lines += [f"note: {note}" for note in self.diagnosis.notes]
        if lines and lines[-1]:
            lines.append("")
        return self.clean("\n".join([*lines, self.verdict()]))

    def as_html(self) -> str:
        """One self-contained page."""
        found = self.diagnosis.findings
        tone: Tone = "bad" if any(f.severity == "error" for f in found) else "unsure" if found else "good"
        subtitle = f"{', '.join(self.diagnosis.read)} · {datetime.now(UTC).strftime('%Y-%m-%d %H:%M UTC')}"
        steps = [(step.title, step.status, self.clean(step.evidence)) for step in self.diagnosis.steps]
        sections = [
            Section("Findings", [part for finding in found for part in self._finding_html(finding)]),
            Section("Checks", [table(("check", "result", "evidence"), steps)] if steps else []),
            Section(
                "Notes", [bullets([self.clean(note) for note in self.diagnosis.notes])] if self.diagnosis.notes else []
            ),
        ]
        return page("anaphora doctor", self.clean(subtitle), self.verdict(), tone, sections)

    def _finding_html(self, finding: Finding) -> list[Any]:
        where = f"{_place(finding)}: " if finding.file else ""
        parts = [paragraph(self.clean(f"{where}{finding.what} ({SIDES[finding.side]}, {finding.severity})"))]
        told = [f"do this: {finding.fix}"] + ([f"seen: {finding.evidence}"] if finding.evidence else [])
        return [*parts, preformatted(self.clean("\n".join([*told, *_edit_lines(finding)])))]


def _finding_lines(number: int, finding: Finding) -> list[str]:
    place = f" {_place(finding)}" if finding.file else ""
    lines = [f"{number}. {finding.severity}, {SIDES[finding.side]}{place}: {finding.what}"]
    if finding.evidence:
        lines.append(f"   seen:    {finding.evidence}")
    lines.append(f"   do this: {finding.fix}")
    return lines + [f"            {line}" for line in _edit_lines(finding)]


def _edit_lines(finding: Finding) -> list[str]:
    if finding.edit is None:
        return []
    put = [f"+ {finding.edit.put.strip()}"] if finding.edit.put else []
    return [f"- {finding.edit.find.strip()}", *put]


def _place(finding: Finding) -> str:
    return f"{finding.file}:{finding.line}" if finding.line else str(finding.file)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _header_values(headers: Sequence[str]) -> Iterable[str]:
    for header in headers:
        value = header.partition(":")[2].strip()
        yield from (value, value.partition(" ")[2])


def _each_text(value: Any, clean: Any) -> Any:
    """Redaction inside of the values, so that it can never break the JSON around them."""
    match value:
        case str():
            return clean(value)
        case dict():
            return {key: _each_text(inner, clean) for key, inner in value.items()}
        case list() | tuple():
            return [_each_text(inner, clean) for inner in value]
    return value
