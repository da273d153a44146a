"""The words of every finding, out of data/findings.toml: one table to read, translate or correct."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from anaphora.probes.doctor.finding import Finding


@cache
def sayings() -> dict[str, dict[str, Any]]:
    """Code -> side, severity, what, fix."""
    return load_table("findings.toml")


def load_table(name: str) -> dict[str, Any]:
    """A TOML file of the data folder."""
    return tomllib.loads(files("anaphora.probes.doctor").joinpath("data", name).read_text(encoding="utf-8"))


def say(code: str, evidence: str = "", /, **values: object) -> Finding:
    """A finding of the table, `values` in the place of its {names}."""
    entry = sayings()[code]
    what, fix = entry["what"].format(**values), entry["fix"].format(**values)
    return Finding(code, entry["side"], what, fix, evidence, entry.get("severity", "error"))
