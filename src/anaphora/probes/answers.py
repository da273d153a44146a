"""From what came back (or did not) to a ProbeError that says whose side it is and what to do."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import httpx

from anaphora.errors import (
    EndpointRefused,
    EndpointTimeout,
    EndpointUnreachable,
    ProbeError,
    StreamCut,
    UnexpectedAnswer,
)
from anaphora.probes.endpoint import Endpoint

_DETAIL_CHARACTERS = 400

_ADVICE = {
    400: "the request was not accepted",
    401: "the key was not accepted: check --api-key (or ANAPHORA_API_KEY) and that the URL is the one it belongs to",
    403: "access is forbidden: the key lacks a right, or a proxy or firewall answered",
    404: "no such route or model: check the path (is /v1 missing?) and --model",
    405: "the route exists but takes another method: check the path",
    413: "the request is too large for the server or a proxy before it",
    422: "the request was not accepted",
    429: "too many requests: wait, or use a key with a higher limit",
    500: "the server failed: its log has the reason",
    502: "a proxy got no valid answer from the server behind it: is that server running?",
    503: "the server is loading, overloaded or shutting down: try again later",
    504: "a proxy waited too long for the server behind it: raise the proxy's read timeout",
}


def from_transport(error: httpx.HTTPError | httpx.InvalidURL, endpoint: Endpoint, *, streaming: bool) -> ProbeError:
    """A failure below HTTP. `streaming`: the status had come already, so the answer was cut."""
    where = f"{endpoint.host}:{endpoint.port}"
    causes = list(_causes(error))
    match error:
        case httpx.ConnectTimeout():
            return EndpointTimeout(
                f"{where} did not accept a connection in time: a firewall drops packets, or the host is down.",
                kind="connect_timeout",
            )
        case httpx.ReadTimeout():
            return EndpointTimeout(
                f"{where} sent nothing for {endpoint.timeout:g} s: it hangs, or needs longer (raise --timeout).",
                kind="read_timeout",
            )
        case httpx.WriteTimeout() | httpx.PoolTimeout():
            kind = "write_timeout" if isinstance(error, httpx.WriteTimeout) else "pool_timeout"
            return EndpointTimeout(f"{where} did not take the request in time; raise --timeout.", kind=kind)
        case httpx.ProxyError():
            return _proxy(endpoint, error)
    if streaming:
        text = f"The answer of {where} broke off: {_brief(error, endpoint)}."
        return StreamCut(f"{text} The server or a proxy before it closed the connection early.", kind="stream_cut")
    if endpoint.proxy.proxy is not None and isinstance(error, httpx.ConnectError):
        return _proxy(endpoint, error)
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return EndpointUnreachable(
            f"The name {endpoint.host} has no address: check its spelling and the DNS settings.", kind="dns"
        )
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return EndpointUnreachable(_tls(causes, endpoint), kind="tls")
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes) or "refused" in str(error).lower():
        return EndpointUnreachable(
            f"Nothing listens on {where}: start the server, or correct host and port.", kind="refused"
        )
    if isinstance(error, httpx.RemoteProtocolError):
        return EndpointUnreachable(
            f"{where} does not speak HTTP here ({_brief(error, endpoint)}): is it https, or another service?",
            kind="protocol",
        )
    if isinstance(error, (httpx.ReadError, httpx.WriteError, httpx.CloseError)):
        return EndpointUnreachable(f"{where} closed the connection without an answer.", kind="reset")
    return EndpointUnreachable(f"No connection to {where}: {_brief(error, endpoint)}.", kind="connect")


def check_status(endpoint: Endpoint, response: httpx.Response, body: str) -> None:
    """Raise EndpointRefused or UnexpectedAnswer unless the status is 2xx."""
    status = response.status_code
    if response.is_success:
        return
    path = response.request.url.path
    if response.is_redirect:
        target = endpoint.redact(response.headers.get("location", "nowhere"))
        raise UnexpectedAnswer(
            f"{path} redirects to {target}: give that URL itself, or sign in if it is a login page.", kind="redirect"
        )
    detail = endpoint.redact(error_detail(body))
    advice = _ADVICE.get(status, "the request failed")
    said = f' It said: "{detail}"' if detail else ""
    raise EndpointRefused(
        f"{path} answered {status}: {advice}.{said}", kind=f"http_{status}", status=status, detail=detail
    )


def read_json(endpoint: Endpoint, response: httpx.Response) -> Any:
    """The JSON of a 2xx answer that was read whole. Raises EndpointRefused or UnexpectedAnswer."""
    text = response.text
    check_status(endpoint, response, text)
    return parse_json(endpoint, text, response.request.url.path)


def parse_json(endpoint: Endpoint, text: str, path: str) -> Any:
    """JSON, or UnexpectedAnswer that says what it was instead."""
    if not text.strip():
        raise UnexpectedAnswer(f"{path} answered with nothing in it: a proxy or another service answers.", kind="empty")
    if is_html(text):
        raise UnexpectedAnswer(
            f"{path} answered with an HTML page, not JSON: the URL leads to a web page or a proxy, "
            f"not to an API ({endpoint.api_base} was asked).",
            kind="html",
        )
    try:
        return json.loads(text)
    except ValueError:
        start = endpoint.redact(text.strip()[:80])
        raise UnexpectedAnswer(f"{path} did not answer with JSON; it begins: {start!r}", kind="not_json") from None


def is_html(text: str) -> bool:
    start = text.lstrip("\ufeff \r\n\t")[:200].lower()
    return start.startswith(("<!doctype html", "<html", "<head", "<body")) or ("<html" in start and start[:1] == "<")


def error_detail(body: str) -> str:
    """The server's own message out of OpenAI's, FastAPI's, Anthropic's and plain error bodies, in bounded length."""
    if is_html(body):
        return "an HTML page"
    try:
        found: Any = json.loads(body)
    except ValueError:
        found = body
    for key in ("error", "message", "detail", "msg"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    if not isinstance(found, str):
        found = json.dumps(found, ensure_ascii=False)
    text = " ".join(found.split())
    return text if len(text) <= _DETAIL_CHARACTERS else text[:_DETAIL_CHARACTERS] + "…"


def _proxy(endpoint: Endpoint, error: Exception) -> EndpointUnreachable:
    return EndpointUnreachable(
        f"The proxy failed ({_brief(error, endpoint)}). {endpoint.proxy.note} "
        f"If {endpoint.host} is reachable without it, add it to NO_PROXY.",
        kind="proxy",
    )


def _tls(causes: list[BaseException], endpoint: Endpoint) -> str:
    reason = " ".join(str(cause) for cause in causes)
    if "WRONG_VERSION_NUMBER" in reason or "record layer failure" in reason:
        return f"{endpoint.host}:{endpoint.port} does not speak TLS: write http:// instead of https://."
    if "self-signed" in reason or "self signed" in reason or "unable to get local issuer" in reason:
        return (
            f"The certificate of {endpoint.host} is not signed by an authority this machine trusts: "
            "point SSL_CERT_FILE at the authority's PEM file."
        )
    if "expired" in reason:
        return f"The certificate of {endpoint.host} has expired: renew it there (or check this machine's clock)."
    if "mismatch" in reason or "not valid for" in reason:
        return f"The certificate is not for the name {endpoint.host}: use a name that it lists."
    return f"TLS with {endpoint.host}:{endpoint.port} failed: {endpoint.redact(str(causes[-1]))}."


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def _brief(error: BaseException, endpoint: Endpoint) -> str:
    return endpoint.redact(str(error) or type(error).__name__)
