"""A server asked about as `anaphora doctor` does, and what was found."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Mapping
from typing import Any

from anaphora.probes.doctor.chain import examine
from anaphora.probes.doctor.finding import Diagnosis
from anaphora.probes.doctor.report import Report
from anaphora.probes.doctor.visit import Visit

KEY = "sk-Zx81secretsecret9Q"
QUICK: dict[str, Any] = {"context_words": 0}
COMPLETION = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "fake",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "length"}],
}
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}


def diagnose(url: str, *, environ: Mapping[str, str] | None = None, **given: Any) -> Diagnosis:
    diagnosis = Diagnosis()
    visit = Visit(url, environ=environ or {}, **given)
    asyncio.run(examine(visit, diagnosis, lambda *_: None))
    text = Report(diagnosis, visit).as_text()
    assert KEY not in text
    return diagnosis


def codes(diagnosis: Diagnosis) -> list[str]:
    return [finding.code for finding in diagnosis.findings]


def step(diagnosis: Diagnosis, name: str) -> str:
    return next(s.evidence for s in diagnosis.steps if s.name == name)


def token_that_ended() -> str:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    return f"{part({'alg': 'HS256'})}.{part({'exp': time.time() - 3600})}.c2lnbmF0dXJl"
