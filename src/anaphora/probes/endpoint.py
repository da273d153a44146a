"""An endpoint under test: what the user typed, understood once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

from anaphora.errors import ConfigError
from anaphora.probes.proxies import NO_PROXY_SET, ProxyChoice, choose_proxy, is_local, is_loopback
from anaphora.probes.redact import redact

_ROUTES = ("/chat/completions", "/completions", "/messages", "/responses", "/embeddings", "/models")
_VERSION = re.compile(r"/(v\d+[a-z0-9]*)(?=/|$)")
_SECRET_HEADERS = ("authorization", "key", "token", "secret", "cookie")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go, and with what. Made by `Endpoint.parse`."""

    root: str
    """Scheme, host and path before the version, without a slash at the end: /metrics and /tokenize are under it."""
    api_base: str
    """What OpenAI clients call base_url: usually root + "/v1"."""
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: float = 120.0
    """Seconds without any byte before a request is given up."""
    proxy: ProxyChoice = NO_PROXY_SET

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        headers: Iterable[str] = (),
        timeout: float = 120.0,
        environ: Mapping[str, str] = os.environ,
    ) -> Endpoint:
        """From what a user types. Raises ConfigError for a URL, key or header that cannot be meant.

        `http://host:8000`, `.../v1`, `.../v1/`, a whole `.../v1/chat/completions` and doubled slashes all mean the
        same. A path with another version (`/v1beta/openai`, `/api/paas/v4`) is taken as the API's base as it stands.
        """
        root, api_base = split_url(url)
        if api_key is not None and (not api_key.isascii() or not api_key.isprintable()):
            raise ConfigError("The API key holds a line break or another character no header can carry; copy it again.")
        return cls(
            root, api_base, api_key or None, model, parse_headers(headers), timeout, choose_proxy(api_base, environ)
        )

    @property
    def host(self) -> str:
        return urlsplit(self.root).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.root)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    def redact(self, text: str) -> str:
        """`text` without this endpoint's key, its secret headers, and anything that looks like a secret."""
        hidden = [v for k, v in self.headers.items() if any(word in k.lower() for word in _SECRET_HEADERS)]
        hidden += [value.split(" ", 1)[1] for value in hidden if " " in value]
        return redact(text, [*hidden, *([self.api_key] if self.api_key else [])])

    def request_headers(self) -> dict[str, str]:
        """Headers of every request; the user's own win over the key's."""
        sent = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        given = {name.lower() for name in self.headers}
        return {**{name: value for name, value in sent.items() if name.lower() not in given}, **self.headers}


def split_url(url: str) -> tuple[str, str]:
    """(root, API base) of any usual form of a base URL. Raises ConfigError."""
    text = url.strip().strip("'\"")
    if "://" not in text:
        host = text.partition("/")[0].partition(":")[0]
        text = ("http://" if is_local(host) or ":" in text.partition("/")[0] else "https://") + text
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{redact(url)!r} is not a URL ({error}); write it like http://127.0.0.1:8000") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{redact(url)!r} is not an http(s) URL; write it like http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise ConfigError("The URL holds a user name or password; take it out and give --api-key or --header instead.")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    netloc = f"{host}:{port}" if port else host
    path = re.sub(r"/{2,}", "/", parts.path).rstrip("/")
    for route in _ROUTES:
        path = path.removesuffix(route)
    path = re.sub(r"(/v1)(?:/v1)+$", r"\1", path)
    version = _VERSION.search(path)
    base = urlunsplit((parts.scheme, netloc, "", "", ""))
    if version is None:
        return base + path, f"{base}{path}/v1"
    return base + path[: version.start()], base + path


def parse_headers(lines: Iterable[str]) -> dict[str, str]:
    """`Name: value` lines of --header. Raises ConfigError without showing the value."""
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name, value = name.strip(), value.strip()
        if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            raise ConfigError("A --header must look like 'Name: value'; one of those given does not.")
        if not value.isascii() or not value.isprintable():
            raise ConfigError(f"The value of --header {name} holds a character that no header can carry.")
        headers[name] = value
    return headers
