"""A server's log, or one error text: what ran out, with the numbers found in it, and the change with its effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from anaphora.probes.doctor.finding import Finding
from anaphora.probes.doctor.log_effects import EFFECTS, Facts
from anaphora.probes.doctor.sayings import load_table, say

Effect = Callable[[re.Match[str], Facts], dict[str, object]]


@dataclass(frozen=True, slots=True)
class Recogniser:
    """One message and the finding it makes."""

    code: str
    pattern: re.Pattern[str]
    effect: Effect
    """The numbers of the finding's words, out of the match and of what else the log told."""


def recognisers() -> Iterator[Recogniser]:
    """In the order of data/logs.toml: of two that match the same line, the first counts."""
    for code, entry in load_table("logs.toml").items():
        for pattern in entry["patterns"]:
            yield Recogniser(code, re.compile(pattern, re.IGNORECASE), EFFECTS.get(code, _groups))


def read_log(text: str, name: str) -> list[Finding]:
    """Findings in the order in which they first appear; a message that comes again is counted, not repeated."""
    facts = Facts.of(text)
    known = list(recognisers())
    seen: dict[str, tuple[re.Match[str], int, int, Recogniser]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        for one in known:
            match = one.pattern.search(line)
            if match is None:
                continue
            first, times = (seen[one.code][1], seen[one.code][2]) if one.code in seen else (number, 0)
            seen[one.code] = (match, first, times + 1, one)
            break
    found = []
    for code, (match, first, times, one) in seen.items():
        if any(code in load_table("logs.toml")[other].get("explains", []) for other in seen):
            continue
        evidence = " ".join(match.string.split())[:300]
        evidence += f" ({times} times)" if times > 1 else ""
        finding = say(code, evidence, **one.effect(match, facts))
        found.append(replace(finding, file=name, line=first))
    return found


def _groups(match: re.Match[str], _facts: Facts) -> dict[str, object]:
    """The named groups as they stand."""
    return {name: value or "?" for name, value in match.groupdict().items()}
