"""Servers that misbehave, on real sockets: routes of a fake one replaced, and raw TCP."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from support.fake_server import Fake, make_app

Handler = Callable[[Request], Awaitable[Response]]

LOGIN_PAGE = "<!doctype html><html><head><title>Sign in</title></head><body><input type=password></body></html>"
WEB_PAGE = "<!doctype html><html><head><title>Chat for everybody</title></head><body>Hello</body></html>"
GATEWAY_PAGE = "<html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1>nginx</body></html>"


def always(response: Callable[[], Response]) -> Handler:
    """A handler that gives the same answer to every request."""

    async def handler(_: Request) -> Response:
        return response()

    return handler


def page(text: str, status: int = 200) -> Handler:
    return always(lambda: HTMLResponse(text, status))


def answer(status: int, body: Any, **headers: str) -> Handler:
    """JSON, or text as it stands."""
    if isinstance(body, str):
        return always(lambda: Response(body, status, headers, media_type="application/json"))
    return always(lambda: JSONResponse(body, status, headers))


def redirect(target: str) -> Handler:
    return always(lambda: RedirectResponse(target, 302))


def replaced(fake: Fake | None = None, *, everything: Handler | None = None, **handlers: Handler) -> Starlette:
    """The fake server with some routes replaced: models, chat, version, or `everything` else."""
    paths = {"models": "/v1/models", "chat": "/v1/chat/completions", "api_version": "/api/version"}
    both = ["GET", "POST"]
    routes = [Route(paths[name], handler, methods=both) for name, handler in handlers.items()]
    if everything is not None:
        return Starlette(routes=[*routes, Route("/{path:path}", everything, methods=both)])
    return Starlette(routes=[*routes, *make_app(fake or Fake()).routes])


def only_streams(stream: Callable[[], AsyncIterator[bytes]], plain: Fake | None = None) -> Handler:
    """Chats that are answered as they should be unless they are streamed."""
    routes = [route for route in make_app(plain or Fake()).routes if isinstance(route, Route)]
    inner = next(route.endpoint for route in routes if route.path == "/v1/chat/completions")

    async def handler(request: Request) -> Response:
        if (await request.json()).get("stream"):
            return StreamingResponse(stream(), media_type="text/event-stream")
        result: Response = await inner(request)
        return result

    return handler


def chunk(text: str, finish: str | None = None) -> bytes:
    """One event of a stream."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return f"data: {json.dumps({'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n".encode()


async def cut_short() -> AsyncIterator[bytes]:
    """Ends in the middle of an event, as if the connection was closed there."""
    for _ in range(3):
        yield chunk("word ")
        await asyncio.sleep(0.01)
    yield chunk("word ")[:30]


async def without_done() -> AsyncIterator[bytes]:
    for _ in range(3):
        yield chunk("word ")
        await asyncio.sleep(0.01)
    yield chunk("", "stop")


async def not_json() -> AsyncIterator[bytes]:
    yield chunk("word ")
    yield b"data: {broken\n\n"


def compressed(app: Starlette) -> Callable[..., Awaitable[None]]:
    """A proxy that gzips whatever the client says it takes."""

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        accepts = any(name == b"accept-encoding" and b"gzip" in value for name, value in scope.get("headers", ()))
        if scope["type"] != "http" or not accepts or not scope["path"].endswith("completions"):
            await app(scope, receive, send)
            return
        body = bytearray()
        start: dict[str, Any] = {}

        async def hold(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            body.extend(message.get("body", b""))
            if not message.get("more_body"):
                kept = [(k, v) for k, v in start["headers"] if k != b"content-length"]
                await send({**start, "headers": [*kept, (b"content-encoding", b"gzip")]})
                await send({"type": "http.response.body", "body": gzip.compress(bytes(body))})

        await app(scope, receive, hold)

    return proxy


@contextmanager
def raw(handle: Callable[[socket.socket], None], context: ssl.SSLContext | None = None) -> Iterator[str]:
    """host:port of a TCP server; `handle` gets each connection, which is closed after it."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.1)
    stopping = threading.Event()

    def one(connection: socket.socket) -> None:
        try:
            connection.settimeout(10)
            with context.wrap_socket(connection, server_side=True) if context else connection as wrapped:
                handle(wrapped)
        except OSError:
            pass

    def loop() -> None:
        while not stopping.is_set():
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            workers.append(threading.Thread(target=one, args=(connection,)))
            workers[-1].start()

    workers: list[threading.Thread] = []
    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        stopping.set()
        thread.join(10)
        server.close()
        for worker in workers:
            worker.join(12)


def silent(connection: socket.socket) -> None:
    """Takes everything and says nothing, until the client gives up."""
    while connection.recv(65536):
        pass


def says(data: bytes) -> Callable[[socket.socket], None]:
    """Reads a little and answers always the same bytes."""

    def handle(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(data)

    return handle


def http(status: str, body: str, kind: str = "text/html") -> bytes:
    """A whole HTTP answer."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return (head + body).encode()


def self_signed(folder: Path) -> ssl.SSLContext:
    """A certificate for 127.0.0.1 that nobody signed but itself."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 90 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
