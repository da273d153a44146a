"""Up to the first byte: URL, proxy variables, name, port, TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from urllib.parse import urlsplit

import httpx

from anaphora.errors import ConfigError
from anaphora.probes.client import ProbeClient
from anaphora.probes.doctor.base_urls import flaw, with_host
from anaphora.probes.doctor.finding import Finding
from anaphora.probes.doctor.keys import cleaned
from anaphora.probes.doctor.sayings import say
from anaphora.probes.doctor.visit import Outcome, Visit
from anaphora.probes.endpoint import Endpoint, split_url
from anaphora.probes.proxies import proxy_variables

USUAL_PORTS = {
    8000: "vLLM or anaphora",
    8080: "llama-server",
    11434: "Ollama",
    30000: "SGLang",
    4000: "LiteLLM",
    1234: "LM Studio",
}
_CONNECT_SECONDS = 5.0
_EXPIRY_DAYS = 14
_TLS_REASONS = (
    ("WRONG_VERSION_NUMBER", "tls.plain"),
    ("record layer failure", "tls.plain"),
    ("expired", "tls.expired"),
    ("mismatch", "tls.name"),
    ("not valid for", "tls.name"),
    ("CERTIFICATE_VERIFY_FAILED", "tls.untrusted"),
)
"""What OpenSSL says -> the finding; the first that matches."""


async def check_url(visit: Visit) -> Outcome:
    """State changes: the visit's endpoint and client."""
    try:
        _, base = split_url(visit.url)
        visit.endpoint = Endpoint.parse(
            visit.url,
            api_key=cleaned(visit.api_key) if visit.api_key else None,
            model=visit.model,
            headers=visit.headers,
            timeout=visit.timeout,
            environ=visit.environ,
        )
    except ConfigError as error:
        return Outcome(str(error), (say("url.shape", problem=error),), stop=True)
    try:
        visit.client = ProbeClient(visit.endpoint)
    except ConfigError as error:
        return Outcome(str(error), (say("proxy.unusable", problem=error, no_proxy=visit.no_proxy),), stop=True)
    findings: list[Finding] = []
    host, typed = visit.endpoint.host, visit.url.strip()
    if host in ("0.0.0.0", "::"):
        findings.append(say("url.any-address", f"typed: {typed}", host=host, right=with_host(base, "127.0.0.1")))
    problem = flaw(typed, base) or ""
    if any(sign in problem for sign in ("route", "doubled", "twice")):
        findings.append(say("url.path", f"typed: {typed}; checked here: {base}", problem=problem, right=base))
    return Outcome(f"base_url for OpenAI clients: {base}; for Claude Code: {visit.endpoint.root}", tuple(findings))


async def check_proxy(visit: Visit) -> Outcome:
    variables = proxy_variables(visit.environ)
    if not variables:
        return Outcome("no proxy variable is set")
    choice, host, names = visit.endpoint.proxy, visit.endpoint.host, ", ".join(variables)
    findings: list[Finding] = []
    if choice.overruled:
        evidence = f"set: {names}; bypassed here"
        findings.append(say("proxy.local", evidence, variable=choice.variable, host=host, no_proxy=visit.no_proxy))
    for lower in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        both = variables.get(lower), variables.get(lower.upper())
        if all(both) and both[0] != both[1]:
            findings.append(say("proxy.case", lower=lower, upper=lower.upper()))
    for name, value in variables.items():
        if name.lower() != "no_proxy" and "://" in value and not urlsplit(value).hostname:
            findings.append(say("proxy.value", variable=name))
    return Outcome(choice.note or f"set: {names}; none concerns {host}", tuple(findings))


async def check_dns(visit: Visit) -> Outcome:
    host, port, by = _next_hop(visit)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        finding = say("dns.proxy" if by else "dns.unknown", str(error), host=host, variable=by)
        return Outcome(finding.what, (finding,), stop=True, unreachable=True)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return Outcome(f"{'proxy ' if by else ''}{host} is {', '.join(addresses[:4])}")


async def check_tcp(visit: Visit) -> Outcome:
    host, port, by = _next_hop(visit)
    began = time.perf_counter()
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _CONNECT_SECONDS)
    except (OSError, TimeoutError) as error:
        finding = await _no_connection(visit, silent=isinstance(error, TimeoutError))
        return Outcome(f"no connection to {host}:{port}", (finding,), stop=True, unreachable=True)
    seconds = time.perf_counter() - began
    peer = writer.get_extra_info("peername")
    writer.close()
    via = f" (the proxy of {by})" if by else ""
    return Outcome(f"connected to {peer[0]}:{peer[1]}{via} in {seconds * 1000:.1f} ms")


async def check_tls(visit: Visit) -> Outcome:
    endpoint = visit.endpoint
    if not endpoint.api_base.startswith("https:"):
        return Outcome("not used (http)")
    if endpoint.proxy.proxy:
        return Outcome("goes through the proxy; seen with the first request")
    connect = asyncio.open_connection(
        endpoint.host, endpoint.port, ssl=httpx.create_ssl_context(), server_hostname=endpoint.host
    )
    try:
        _, writer = await asyncio.wait_for(connect, 2 * _CONNECT_SECONDS)
    except (OSError, TimeoutError) as error:
        code = next((code for sign, code in _TLS_REASONS if sign in str(error)), "tls.failed")
        right = endpoint.api_base.replace("https:", "http:", 1)
        finding = say(code, str(error) or type(error).__name__, host=endpoint.host, right=right)
        return Outcome(finding.what, (finding,), stop=True, unreachable=True)
    tls = writer.get_extra_info("ssl_object")
    days = int(ssl.cert_time_to_seconds(tls.getpeercert()["notAfter"]) - time.time()) // 86400
    writer.close()
    findings = (say("tls.expires", days=days),) if days < _EXPIRY_DAYS else ()
    return Outcome(f"{tls.version()}, certificate good for {days} days", findings)


async def speaks_tls(visit: Visit) -> bool:
    """Whether the port answers a TLS hello, whatever its certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return await _connects(visit.endpoint.host, visit.endpoint.port, _CONNECT_SECONDS, context)


async def _no_connection(visit: Visit, *, silent: bool) -> Finding:
    host, port, by = _next_hop(visit)
    address = f"{host}:{port}"
    if by:
        evidence = "no connection to the proxy; the server itself was not asked"
        return say("proxy.dead", evidence, variable=by, address=address, no_proxy=visit.no_proxy)
    if silent:
        return say("tcp.silent", f"no answer in {_CONNECT_SECONDS:g} s", address=address)
    if visit.endpoint.is_loopback and (others := await _listening(host, port)):
        told = ", ".join(f"{p} (usually {USUAL_PORTS[p]})" for p in others)
        right = visit.endpoint.api_base.replace(f":{port}", f":{others[0]}", 1)
        return say("tcp.other-port", "connection refused", address=address, other=told, right=right, port=port)
    return say("tcp.refused", "connection refused", address=address, port=port)


async def _listening(host: str, port: int) -> list[int]:
    """Of the ports that such servers usually have, those that take a connection on this machine."""
    candidates = [p for p in USUAL_PORTS if p != port]
    opened = await asyncio.gather(*(_connects(host, p, 0.5) for p in candidates))
    return [p for p, is_open in zip(candidates, opened, strict=True) if is_open]


async def _connects(host: str, port: int, seconds: float, context: ssl.SSLContext | None = None) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port, ssl=context), seconds)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _next_hop(visit: Visit) -> tuple[str, int, str | None]:
    """(host, port, the variable that named it): the proxy where one is used, else the server."""
    proxy = visit.endpoint.proxy.proxy
    if proxy is None:
        return visit.endpoint.host, visit.endpoint.port, None
    parts = urlsplit(proxy)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80), visit.endpoint.proxy.variable
