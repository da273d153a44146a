"""valkey://USER:PASSWORD@HOST:PORT/DB?..., valkeys://, redis://, rediss://, unix:///PATH?db=N."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from valkey.connection import SSLConnection, UnixDomainSocketConnection

from anaphora.errors import ConfigError
from anaphora.tiers.remote.url import one_of, options, seconds, whole

MAX_DB = 1 << 20
_OURS: dict[str, Callable[[str], Any]] = {
    "timeout": seconds,
    "connections": whole(1, 1024),
    "ttl": whole(1, 10 * 365 * 86400),
    "db": whole(0, MAX_DB),
}
_TLS: dict[str, Callable[[str], Any]] = {
    "ssl_ca_certs": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_cert_reqs": one_of("required", "none"),
}
_SECURE = {"valkeys", "rediss"}


@dataclass(frozen=True, slots=True)
class ValkeyOptions:
    """What a URL says, resolved."""

    connection: dict[str, Any]
    """Keyword arguments of the client's connection; `connection_class` where it is not plain TCP."""
    timeout: float = 2.0
    """Seconds of one operation, besides those for its bytes (see deadline.py)."""
    connections: int = 4
    """To each node, at most."""
    ttl: int = 0
    """Seconds after which the server forgets a block; 0: it keeps it as long as its memory allows."""


def parse(url: str) -> ValkeyOptions:
    """Raises ConfigError and says what is wrong with the URL."""
    secure = url.partition(":")[0].lower() in _SECURE
    parts, given = options(url, {**_OURS, **(_TLS if secure else {})})
    connection: dict[str, Any] = {}
    try:
        for name, value in (("username", parts.username), ("password", parts.password)):
            if value:
                connection[name] = unquote(value)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--remote-cache: {error}; write {parts.scheme}://HOST:PORT/DB") from None
    if parts.scheme == "unix":
        if not parts.path.strip("/"):
            raise ConfigError(
                "--remote-cache: unix:// needs the path of a socket, such as unix:///run/valkey.sock?db=0"
            )
        connection |= {"path": unquote(parts.path), "connection_class": UnixDomainSocketConnection}
    else:
        connection |= {"host": parts.hostname or "localhost", "port": port or 6379}
        if parts.path.strip("/"):
            given.setdefault("db", _database(parts.path.strip("/")))
    if secure:
        connection |= {name: given[name] for name in _TLS if name in given}
        connection["connection_class"] = SSLConnection
        connection["ssl_check_hostname"] = given.get("ssl_cert_reqs") != "none"
    connection["db"] = given.get("db", 0)
    return ValkeyOptions(
        connection, **{name: given[name] for name in ("timeout", "connections", "ttl") if name in given}
    )


def _database(text: str) -> int:
    try:
        return whole(0, MAX_DB)(text)
    except ValueError as error:
        raise ConfigError(f"--remote-cache: /{text} is no database: {error}, such as /0") from None
