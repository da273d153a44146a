"""--fix: write the safe edits, and keep the file as it was beside it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from anaphora.errors import ConfigError
from anaphora.probes.doctor.finding import Edit
from anaphora.probes.doctor.source import Source


def fix(source: Source) -> tuple[int, Path | None]:
    """(edits written, the backup). The file is replaced at once, with its mode. Raises ConfigError."""
    edits = [finding.edit for finding in source.findings if finding.edit is not None and finding.edit.safe]
    text = apply(source.text, edits)
    if text == source.text:
        return 0, None
    backup = _free_name(source.path)
    try:
        shutil.copy2(source.path, backup)
        handle, name = tempfile.mkstemp(dir=source.path.parent, prefix=f".{source.path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        shutil.copymode(source.path, name)
        os.replace(name, source.path)
    except OSError as error:
        raise ConfigError(f"--fix cannot write {source.path}: {error.strerror}; nothing was changed") from None
    return len(edits), backup


def apply(text: str, edits: list[Edit]) -> str:
    """The text with the edits made. A line that only an edit emptied goes away; so does a `\\` left alone."""
    lines = text.split("\n")
    gone: set[int] = set()
    for edit in edits:
        index = edit.line - 1
        lines[index] = lines[index].replace(edit.find, edit.put, 1)
        if lines[index].strip() in ("", "\\", "-"):
            gone.add(index)
    for index in sorted(gone):
        ends_command = not lines[index].rstrip().endswith("\\")
        before = next((i for i in range(index - 1, -1, -1) if i not in gone), None)
        if before is not None and lines[before].rstrip().endswith("\\") and ends_command:
            lines[before] = lines[before].rstrip().removesuffix("\\").rstrip()  # what it continued to is gone
    return "\n".join(line for index, line in enumerate(lines) if index not in gone)


def _free_name(path: Path) -> Path:
    for number in range(1, 1000):
        candidate = path.with_name(f"{path.name}.bak" if number == 1 else f"{path.name}.bak{number}")
        if not candidate.exists():
            return candidate
    raise ConfigError(f"{path} has 999 backups already; remove some")
