"""How each client wants its base URL: with /v1, or the root."""

from __future__ import annotations

import re
from urllib.parse import urlsplit, urlunsplit

from anaphora.errors import ConfigError
from anaphora.probes.endpoint import split_url


def openai_base(url: str) -> str | None:
    """What OpenAI clients (and Codex) call base_url: with the version, without a slash at the end. None = no URL."""
    try:
        return split_url(url)[1]
    except ConfigError:
        return None


def anthropic_base(url: str) -> str | None:
    """What Claude Code calls ANTHROPIC_BASE_URL: without /v1, which it adds itself. None = no URL."""
    try:
        root, _ = split_url(url)
    except ConfigError:
        return None
    return root


def flaw(url: str, right: str | None) -> str | None:
    """Why `url` is not the base URL that a client wants, as the end of "the base URL ..."; None = it is right."""
    text = url.strip()
    if right is None:
        return "is not an http(s) URL"
    if text == right:
        return None
    if "://" not in text:
        return "has no http:// or https:// in front"
    path = urlsplit(text).path
    if re.search(r"/(?:chat/completions|completions|messages|responses|embeddings|models)/?$", path):
        return "names a whole route, and clients append the route themselves"
    if "//" in path:
        return "has a doubled slash in its path, which many servers answer with 404"
    if re.search(r"/v1/v1", path):
        return "has /v1 twice"
    if path.endswith("/") and text.rstrip("/") == right:
        return "ends in a slash, which some clients double (`/v1//models`)"
    if right.endswith("/v1") and not path.rstrip("/").endswith("/v1"):
        return "lacks /v1, so this client would ask /chat/completions instead of /v1/chat/completions"
    if re.search(r"/v1/?$", path):
        return "ends in /v1, which this client appends itself (it would ask /v1/v1/messages)"
    return "is not written as this client reads it"


def with_host(url: str, host: str) -> str:
    """The same URL at another host."""
    parts = urlsplit(url)
    netloc = f"{host}:{parts.port}" if parts.port else host
    return urlunsplit((parts.scheme, netloc, parts.path, "", ""))
