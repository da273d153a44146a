"""What every probe's report shares: the JSON envelope and the words at the top."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any

import anaphora
from anaphora.probes.endpoint import Endpoint
from anaphora.probes.engines import Engine

SCHEMA_VERSION = 1


def envelope(
    command: str, endpoint: Endpoint, engine: Engine, model: str | None, *, interrupted: bool
) -> dict[str, Any]:
    """The head of a JSON report; the command's own keys follow it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "anaphora_version": anaphora.__version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "endpoint": endpoint.api_base,
        "model": model,
        "engine": engine.as_dict(),
        "proxy": endpoint.proxy.note or None,
        "interrupted": interrupted,
    }


def to_json(report: dict[str, Any], endpoint: Endpoint) -> str:
    """Pretty JSON, finite numbers only, redacted."""
    return endpoint.redact(json.dumps(_finite(report), indent=2, ensure_ascii=False, allow_nan=False))


def subtitle(endpoint: Endpoint, engine: Engine, model: str | None) -> str:
    """One line for the top of an HTML page."""
    sure = "" if engine.sure == "certain" else f" ({engine.sure})"
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{endpoint.api_base} · {model or 'no model'} · {engine.title}{sure} · {when}"


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case float() if not math.isfinite(value):
            return None
    return value
