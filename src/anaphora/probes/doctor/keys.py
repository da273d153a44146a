"""What can be wrong with a key as it was typed or stored, without asking anybody. Nothing here shows a key."""

from __future__ import annotations

import base64
import binascii
import json
import re
import time

_PLACEHOLDER = re.compile(
    r"(?i)^(?:your|my|insert|replace|paste|the)[-_ ].*|.*(?:your[-_ ]?(?:api[-_ ]?)?key|changeme|replace[-_ ]?me).*"
    r"|<.*>|x{4,}|\.{3,}|sk-(?:x+|\.+|\*+)$|.*\*{4,}.*"
)
_VARIABLE = re.compile(r"^(?:\$\{?[A-Za-z_]\w*\}?|%[A-Za-z_]\w*%|\{env:[A-Za-z_]\w*\}|os\.environ/\w+)$")

PROVIDERS = (
    ("sk-ant-", "Anthropic", "anthropic.com"),
    ("sk-or-", "OpenRouter", "openrouter.ai"),
    ("sk-proj-", "OpenAI", "openai.com"),
    ("gsk_", "Groq", "groq.com"),
    ("hf_", "Hugging Face", "huggingface.co"),
    ("xai-", "xAI", "x.ai"),
    ("nvapi-", "NVIDIA", "nvidia.com"),
    ("pplx-", "Perplexity", "perplexity.ai"),
    ("AIza", "Google", "googleapis.com"),
)
"""(how the keys begin, whose they are, the host they are for)."""


def flaws(key: str) -> list[str]:
    """What is wrong with the text of a key, each as the end of the sentence "the key ..."."""
    found: list[str] = []
    if "\n" in key or "\r" in key:
        found.append("holds a line break")
    if key.startswith(("'", '"')) or key.endswith(("'", '"')):
        found.append("is in quotes that belong to the shell or the file, not to it")
    bare = key.strip().strip("\"'")
    if bare.lower().startswith(("bearer ", "basic ", "authorization:", "x-api-key:")):
        found.append("has the word of the header in front of it; the key alone is wanted")
        bare = bare.partition(" ")[2]
    if key != key.strip(" \t"):
        found.append("has spaces at an end")
    if " " in bare.strip():
        found.append("has a space in it")
    if any(not (32 <= ord(c) < 127) for c in key.replace("\n", "").replace("\r", "")):
        found.append("has a character that is not plain ASCII (copied from a web page?)")
    if _VARIABLE.match(bare):
        found.append("is the name of a variable that nobody replaced by its value")
    elif bare and _PLACEHOLDER.match(bare):
        found.append("is a placeholder, not a key")
    return found


def is_reference(value: str) -> bool:
    """Whether a stored value only names a variable that holds the key."""
    return bool(_VARIABLE.match(value.strip().strip("\"'")))


def is_placeholder(value: str) -> bool:
    """Whether a value only stands for a key: EMPTY, none, dummy, your-key ..."""
    bare = value.strip().strip("\"'")
    return (
        len(bare) < 8 or bool(_PLACEHOLDER.match(bare)) or bare.lower() in ("anything", "no-key-needed", "not-needed")
    )


def cleaned(key: str) -> str:
    """The key without quotes, spaces, line breaks and header words around it."""
    bare = "".join(key.split("\n")).replace("\r", "").strip().strip("\"'").strip()
    bare = re.sub(r"(?i)^(?:authorization:\s*)?(?:bearer|basic)\s+|^x-api-key:\s*", "", bare)
    return "".join(c for c in bare if 32 < ord(c) < 127)


def expired_at(key: str) -> float | None:
    """When a token that is a JWT ran out (seconds since 1970); None for others and for those that are still good."""
    parts = key.split(".")
    if len(parts) != 3 or not key.startswith("eyJ"):
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        end = float(claims["exp"])
    except (ValueError, KeyError, TypeError, binascii.Error):
        return None
    return end if end < time.time() else None


def belongs_elsewhere(key: str, host: str) -> str | None:
    """Whose key it looks like, where the host is of another well-known provider; else None."""
    known = [suffix for _, _, suffix in PROVIDERS]
    for start, owner, suffix in PROVIDERS:
        if key.startswith(start):
            return owner if not host.endswith(suffix) and any(host.endswith(other) for other in known) else None
    return None
