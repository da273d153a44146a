"""Comments, YAML and shell commands from lines."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Sequence

from anaphora.planning.emit.target import Line, Scalar
from anaphora.planning.settings import PlanSettings

_WIDTH = 110


def header(settings: PlanSettings, made_for: str, use: str) -> str:
    """Comment lines: what this is for, how to use it, whether it fits, and every correction."""
    lines = [f"{settings.model} on {settings.hardware}, for {made_for}. Written by `anaphora plan`.", use]
    lines.append(f"{settings.verdict}.")
    lines += [f"CORRECTED: {text}." for text in settings.corrections]
    return "".join(comment(line) for line in lines)


def comment(text: str, indent: str = "") -> str:
    """Text as comment lines of at most 110 columns."""
    first, rest = f"{indent}# ", f"{indent}#   "
    wrapped = textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in wrapped)


def yaml_lines(lines: Iterable[Line], indent: str = "") -> str:
    """`key: value` with its reason above it; options that are not set are comments."""
    parts = []
    for line in lines:
        if line.value is None:
            parts.append(comment(f"({line.key}) {line.why}.", indent))
        else:
            parts.append(comment(f"{line.why}.", indent) + f"{indent}{line.key}: {yaml_scalar(line.value)}\n")
    return "".join(parts)


def yaml_scalar(value: Scalar) -> str:
    """A scalar that YAML reads back as itself."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"{value:g}" if isinstance(value, float) else str(value)
    plain = value and all(char.isalnum() or char in "/._-" for char in value) and value[0].isalpha()
    words = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
    return value if plain and value.lower() not in words else "'" + value.replace("'", "''") + "'"


def command(words: Sequence[str], lines: Sequence[Line]) -> str:
    """Reasons as comments, then one shell command, a flag a line. True is a bare flag, False leaves it out."""
    reasons = []
    flags = []
    for line in lines:
        parts = flag(line)
        reasons.append(comment(f"{' '.join(parts) if parts else f'({line.key})'}: {line.why}."))
        if parts:
            flags.append(" ".join(parts))
    return "".join(reasons) + " \\\n  ".join([shlex.join(words), *flags]) + "\n"


def flag(line: Line) -> list[str]:
    """An option as words of a command, quoted for a shell; empty when it is not set."""
    if line.value is None or line.value is False:
        return []
    if line.value is True:
        return [line.key]
    text = f"{line.value:g}" if isinstance(line.value, float) else str(line.value)
    return [line.key, shlex.quote(text)]
