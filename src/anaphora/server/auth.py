"""API keys: kept as digests, compared in constant time, and, if asked for, each with its own cache."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from anaphora.errors import AuthenticationFailed, ConfigError
from anaphora.server.errors import error_response
from anaphora.server.settings import ServerSettings

OPEN_ROUTES = frozenset({"/health", "/version", "/metrics"})
"""Answered without a key, as in vLLM: probes and Prometheus need them, and none shows a prompt or an answer."""

_KEY_DIGEST = "anaphora.key_digest"
"""Under this name the ASGI scope holds the digest of the caller's key."""


def hash_keys(keys: Iterable[str]) -> tuple[bytes, ...]:
    """Digests for ServerSettings. Raises ConfigError for keys that no header can carry."""
    digests: list[bytes] = []
    for number, key in enumerate(keys, start=1):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"API key number {number} must be printable ASCII without spaces, and not empty.")
        digests.append(_digest(key))
    return tuple(digests)


def find_key(authorization: str | None, digests: tuple[bytes, ...]) -> bytes:
    """The digest of the caller's key; raises AuthenticationFailed. Takes the same time whichever key it is."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise AuthenticationFailed("No API key: send it in the header `Authorization: Bearer KEY`.")
    given = _digest(key.strip())
    matches = [hmac.compare_digest(given, known) for known in digests]
    if not any(matches):
        raise AuthenticationFailed("This API key is not one of the server's: check the key and the base URL.")
    return given


class Authentication:
    """ASGI middleware: turns requests without a valid key away before anything of them is read."""

    def __init__(self, app: ASGIApp, *, digests: tuple[bytes, ...]) -> None:
        self._app = app
        self._digests = digests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_ROUTES:
            try:
                scope[_KEY_DIGEST] = find_key(Headers(scope=scope).get("authorization"), self._digests)
            except AuthenticationFailed as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def caller(scope: Scope) -> bytes:
    """The digest of the caller's key; empty where the server has no keys."""
    return bytes(scope.get(_KEY_DIGEST, b""))


def salt_for(scope: Scope, settings: ServerSettings, given: str | None) -> str | None:
    """The salt of the request's cached blocks: as given, or with --salt-by-key bound to the caller's key too."""
    if not settings.salt_by_key:
        return given
    return hmac.new(caller(scope), (given or "").encode(), hashlib.sha256).hexdigest()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
