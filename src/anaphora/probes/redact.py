"""Keys and tokens never leave: every text of a report, a message or a bundle goes through `redact`."""

from __future__ import annotations

import re
from collections.abc import Iterable

REDACTED = "[redacted]"

_NAME = (
    r"(?:[a-z0-9_-]*(?:api[_-]?key|auth[_-]?token|access[_-]?token|refresh[_-]?token|id[_-]?token|bearer[_-]?token)"
    r"|[a-z0-9_-]*(?:secret|password|passwd)[a-z0-9_-]*|authorization|proxy-authorization|cookie|set-cookie)"
)

_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    # scheme://user:password@host
    (re.compile(r"(?<=://)[^/\s@\"']+@"), f"{REDACTED}@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{3,}"), rf"\1 {REDACTED}"),
    # API_KEY=value, "api_key": "value", x-api-key: value; a value that only names a variable ($KEY) may stay
    (re.compile(rf"(?i)\b({_NAME})(\"|')?(\s*[:=]\s*)(\"|')?(?!\$|\[redacted|bearer |basic )[^\s\"',;}}]+"),
     rf"\1\2\3\4{REDACTED}"),
    (re.compile(r"(?i)(?<=[?&])(key|token|sig|signature|code)=[^&\s\"']+"), rf"\1={REDACTED}"),
    # the forms that keys of well-known services have
    (re.compile(r"\b(?:sk|pk|rk|gsk|nvapi|pplx|xai|csk|fw|tgp_v1|r8|hf|ghp|gho|ghs|glpat|xox[abps])[-_][A-Za-z0-9_-]{8,}"),
     REDACTED),
    (re.compile(r"\b(?:AKIA|AIza|ya29\.)[A-Za-z0-9_-]{12,}"), REDACTED),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?"), REDACTED),
)  # fmt: skip


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without the given secrets and without anything that looks like one."""
    for secret in sorted({s.strip() for s in secrets}, key=len, reverse=True):
        if len(secret) >= 4:  # shorter ones are placeholders like "x", and would eat innocent letters
            text = text.replace(secret, REDACTED)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text
