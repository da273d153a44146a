"""Reader of Prometheus' text format: samples only, no types, no dependencies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_SAMPLE = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]*)"
    rf"(?:\{{((?:[^\"}}]|{_QUOTED})*)\}})?"  # labels
    r"\s+(\S+)(?:\s+\S+)?(?:\s+#.*)?$"  # value, timestamp, exemplar
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


def parse_metrics(text: str) -> list[Sample]:
    """Every sample of a scrape; lines that are none (comments, HTML, garbage) are passed over."""
    samples = []
    for line in text.splitlines():
        match = _SAMPLE.match(line.strip()) if line[:1] != "#" else None
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        labels = {k: re.sub(r"\\.", lambda m: _ESCAPES.get(m[0], m[0]), v) for k, v in _LABEL.findall(match[2] or "")}
        samples.append(Sample(match[1], labels, value))
    return samples


def total(samples: Iterable[Sample], name: str) -> float | None:
    """Sum over all labels of `name`, or of `name_total` as counters are exported; None where there is no such."""
    values = [s.value for s in samples if s.name in (name, f"{name}_total")]
    return sum(values) if values else None


def largest(samples: Iterable[Sample], name: str) -> float | None:
    """The largest value over all labels."""
    return max((s.value for s in samples if s.name == name), default=None)
