"""mooncake://MASTER:PORT?metadata=P2PHANDSHAKE&protocol=tcp&..."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anaphora.errors import ConfigError
from anaphora.tiers.remote.url import one_of, options, seconds, size, whole

DEFAULT_PORT = 50051
_OPTIONS: dict[str, Callable[[str], Any]] = {
    "metadata": str,
    "protocol": one_of("tcp", "rdma"),
    "devices": str,
    "host": str,
    "segment": size,
    "tenant": str,
    "timeout": seconds,
    "workers": whole(1, 64),
}


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """What a URL says, resolved."""

    master: str
    """HOST:PORT of the master."""
    metadata: str = "P2PHANDSHAKE"
    """Where clients find each other: P2PHANDSHAKE (each other), http://HOST:PORT/metadata, etcd://..., redis://..."""
    protocol: str = "tcp"
    devices: str = ""
    """RDMA devices, separated by commas; empty: all."""
    host: str = ""
    """This machine, as the other clients reach it; empty: its address on the way to the master."""
    segment: int = 0
    """Bytes of memory this server adds to the store; 0: it only uses what others hold."""
    tenant: str = "default"
    timeout: float = 2.0
    """Seconds of one operation, besides those for its bytes (see deadline.py)."""
    workers: int = 2
    """Operations at a time."""

    def local_host(self) -> str:
        """Raises OSError when there is no way to the master."""
        if self.host:
            return self.host
        host, _, port = self.master.rpartition(":")
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: the kernel only chooses the address to send from
            return str(probe.getsockname()[0])


def parse(url: str) -> MooncakeOptions:
    """Raises ConfigError and says what is wrong with the URL."""
    parts, given = options(url, _OPTIONS)
    try:
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError as error:
        raise ConfigError(f"--remote-cache: {error}; write mooncake://HOST:{DEFAULT_PORT}") from None
    if not host or parts.path.strip("/") or parts.username or parts.password:
        raise ConfigError(
            f"--remote-cache: write mooncake://HOST:{DEFAULT_PORT}, the master's address, with options after a '?'; "
            "Mooncake has no users and no paths"
        )
    return MooncakeOptions(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", **given)
