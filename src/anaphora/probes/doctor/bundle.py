"""--bundle: what a bug report needs, in one zip file, redacted."""

from __future__ import annotations

import json
import platform
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import anaphora
from anaphora.errors import ConfigError
from anaphora.probes.doctor.report import Report
from anaphora.probes.doctor.source import Source
from anaphora.probes.proxies import proxy_variables

LOG_BYTES = 1 << 20
"""Of a log, its end."""


def write_bundle(
    path: Path, report: Report, sources: Sequence[Source], logs: Mapping[str, str], environ: Mapping[str, str]
) -> None:
    """Report as text and JSON, the machine, the files and logs given. Raises ConfigError where it cannot be written."""
    entries = {
        "report.txt": report.as_text(),
        "report.json": report.as_json(),
        "machine.json": json.dumps(_machine(environ), indent=2),
    }
    for number, source in enumerate(sources, start=1):
        entries[f"files/{number}-{source.path.name}"] = source.text
    for number, (name, text) in enumerate(logs.items(), start=1):
        entries[f"logs/{number}-{Path(name).name}"] = text[-LOG_BYTES:]
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in entries.items():
                archive.writestr(report.clean(name), report.clean(text))
    except OSError as error:
        raise ConfigError(f"--bundle {path}: {error.strerror}; give a file in a folder that exists") from None


def _machine(environ: Mapping[str, str]) -> dict[str, object]:
    return {
        "anaphora": anaphora.__version__,
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "proxy_variables": sorted(proxy_variables(environ)),
    }
