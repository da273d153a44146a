"""Proxy variables: which one would be used for an address, and whether that makes sense."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

_NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@dataclass(frozen=True, slots=True)
class ProxyChoice:
    """What happens to requests for one address."""

    proxy: str | None
    """URL of the proxy that is used, None for a direct connection."""
    variable: str | None
    """The variable that names a proxy for this address, whether it is used or not."""
    note: str
    """One sentence for the report, without credentials; empty where no proxy is set at all."""
    overruled: bool = False
    """A variable sends a local address through a proxy; we go direct, other clients may not."""


NO_PROXY_SET = ProxyChoice(None, None, "")


def proxy_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The proxy variables that are set, under the names they are set by."""
    return {name: value for name, value in sorted(environ.items()) if name.lower() in _NAMES and value.strip()}


def choose_proxy(url: str, environ: Mapping[str, str]) -> ProxyChoice:
    """Lower case wins over upper case and the scheme's variable over ALL_PROXY, as curl and Python have it.

    Loopback and private addresses are never sent to a proxy: it could not reach them, or not the same ones.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port
    variable = next(
        (name for base in (f"{parts.scheme}_proxy", "all_proxy") for name in (base, base.upper())
         if environ.get(name, "").strip()),
        None,
    )  # fmt: skip
    if variable is None:
        return NO_PROXY_SET
    no_proxy = environ.get("no_proxy", "") or environ.get("NO_PROXY", "")
    if excluded(host, port, no_proxy):
        return ProxyChoice(None, variable, f"{variable} is set, NO_PROXY excludes {host}: direct connection.")
    if is_local(host):
        note = (
            f"{variable} would send {host} through a proxy, which cannot reach it; bypassed here. "
            f"Other clients may not bypass it: add {host} to NO_PROXY."
        )
        return ProxyChoice(None, variable, note, overruled=True)
    proxy = environ[variable].strip()
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    shown = urlsplit(proxy)
    where = f"{shown.hostname}:{shown.port}" if shown.port else str(shown.hostname)
    return ProxyChoice(proxy, variable, f"Requests go through the proxy {where} ({variable}).")


def excluded(host: str, port: int | None, no_proxy: str) -> bool:
    """Whether a NO_PROXY value covers a host: names and their subdomains, `*`, host:port, addresses and CIDR ranges."""
    host = host.lower().strip("[]")
    for entry in (part.strip().lower() for part in no_proxy.split(",")):
        if entry == "*":
            return True
        name, _, entry_port = entry.rpartition(":") if entry.count(":") == 1 else (entry, "", "")
        if entry_port and entry_port != str(port):
            continue
        name = name.strip("[]").removeprefix("*").lstrip(".")
        if not name:
            continue
        if host == name or host.endswith(f".{name}") or _in_network(host, name):
            return True
    return False


def is_loopback(host: str) -> bool:
    """localhost and its subdomains, 127.0.0.0/8, ::1, and the unspecified address, which reaches the same."""
    address = _address(host)
    if address is None:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def is_local(host: str) -> bool:
    """Loopback, private and link-local addresses, and names that only a local resolver knows."""
    address = _address(host)
    if address is None:
        name = host.lower()
        return is_loopback(name) or "." not in name or name.endswith((".local", ".internal", ".lan"))
    return is_loopback(host) or address.is_private or address.is_link_local


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _in_network(host: str, entry: str) -> bool:
    address = _address(host)
    if address is None or "/" not in entry:
        return False
    try:
        return address in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False
