"""Load on an endpoint: a closed loop that keeps N requests in flight, or an open loop of Poisson arrivals.

Closed: each of N clients asks again as soon as it is answered, so a slow server slows the load down. Open: requests
come whether or not the earlier ones are done, as users do; only there does a server that is too slow show a queue
without end. (Schroeder, Wierman, Harchol-Balter, "Open versus closed: a cautionary tale", NSDI 2006.)
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from anaphora.errors import ProbeError
from anaphora.probes.answers import check_status, from_transport
from anaphora.probes.client import ProbeClient
from anaphora.probes.endpoint import Endpoint
from anaphora.probes.stream import EventReader, StreamResult, read_whole
from anaphora.probes.wire import Connection, Cut, Exchange, Stale
from anaphora.probes.workload import Job


@dataclass(slots=True)
class Outcome:
    """One request: made when it is sent, complete when `ended` is set. Absolute times are of `time.perf_counter`."""

    job: Job
    started: float
    first: bool = False
    """The first request of its client in a closed loop."""
    late: float = 0.0
    """Open loop: seconds after its scheduled arrival."""
    ended: float | None = None
    partial: StreamResult = field(default_factory=lambda: StreamResult(0.0))
    """The answer as far as it has come; not filled through a proxy."""
    result: StreamResult | None = None
    error: ProbeError | None = None


_LATER = 0.005
"""Seconds from a read to the parsing of what is in it."""

Send = Callable[[Job, StreamResult], Awaitable[StreamResult]]
"""Fills the result while the answer comes, and returns it. Raises ProbeError."""


class Recorder(Protocol):
    """Told about every request; `stop` ends the load."""

    stop: asyncio.Event

    def sent(self, outcome: Outcome) -> None: ...

    def done(self, outcome: Outcome) -> None: ...


class Sender:
    """Async context manager that sends jobs over as many connections as are in use at once, and keeps them open.

    Through a proxy the general client is used, which costs more per chunk.
    """

    def __init__(self, client: ProbeClient, model: str, extra: Mapping[str, Any] | None = None) -> None:
        self._client = client
        self._endpoint = client.endpoint
        self._model = model
        self._extra = extra or {}
        self._idle: list[Connection] = []
        self.url = client.url("/v1/chat/completions")
        parts = urlsplit(self.url)
        self._path = parts.path
        self._context = httpx.create_ssl_context() if parts.scheme == "https" and not self._proxied else None
        headers = {
            "Host": parts.netloc,
            "User-Agent": "anaphora",
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
            **self._endpoint.request_headers(),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._head = f"POST {parts.path} HTTP/1.1\r\n{lines}".encode("latin-1")

    @property
    def _proxied(self) -> bool:
        return self._endpoint.proxy.proxy is not None

    async def __aenter__(self) -> Sender:
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().close()

    async def __call__(self, job: Job, result: StreamResult) -> StreamResult:
        """Raises ProbeError."""
        body = self._client.chat_body(self._model, job.messages, job.output_tokens, self._extra)
        content = json.dumps(body, ensure_ascii=False).encode()
        if self._proxied:
            return await self._client.stream("/v1/chat/completions", body)
        request = self._head + b"Content-Length: %d\r\n\r\n" % len(content) + content
        reading = _Reading(self._endpoint, result)
        try:
            exchange, connect_seconds = await self._exchange(request, reading)
        except httpx.HTTPError as error:
            raise from_transport(error, self._endpoint, streaming=isinstance(error, Cut)) from error
        self._check(exchange)
        result.connect_seconds = connect_seconds
        return reading.finish(exchange, self._path)

    async def _exchange(self, request: bytes, reading: _Reading) -> tuple[Exchange, float]:
        while self._idle:
            connection = self._idle.pop()
            try:
                exchange = await connection.request(request, reading.notify)
            except Stale:
                continue
            self._keep(connection)
            return exchange, 0.0
        began = time.perf_counter()
        endpoint = self._endpoint
        connection = await Connection.open(endpoint.host, endpoint.port, self._context, endpoint.timeout)
        exchange = await connection.request(request, reading.notify)
        self._keep(connection)
        return exchange, exchange.sent - began

    def _keep(self, connection: Connection) -> None:
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()

    def _check(self, exchange: Exchange) -> None:
        if not exchange.is_success:
            question = httpx.Request("POST", self.url)
            answer = httpx.Response(exchange.status, headers=exchange.headers, request=question)
            check_status(self._endpoint, answer, exchange.body.decode(errors="replace"))


class _Reading:
    """A stream that is parsed while it comes. An error is kept until the end, where somebody waits for it."""

    def __init__(self, endpoint: Endpoint, result: StreamResult) -> None:
        self._result = result
        self._endpoint = endpoint
        self._events = EventReader(result, endpoint)
        self._error: ProbeError | None = None
        self._loop = asyncio.get_running_loop()

    def notify(self, exchange: Exchange) -> None:
        """Take in a moment, when the reads of other streams have their stamps too."""
        self._loop.call_later(_LATER, self.take, exchange)

    def take(self, exchange: Exchange) -> None:
        """Parse what is there and remove it; other answers than streams stay until they are whole."""
        if not exchange.is_success or "event-stream" not in exchange.headers.get("content-type", ""):
            return
        pieces, exchange.pieces = exchange.pieces, []
        try:
            for at, data in pieces:
                if self._error is None:
                    self._events.feed(data, at - exchange.sent)
        except ProbeError as error:
            self._error = error

    def finish(self, exchange: Exchange, path: str) -> StreamResult:
        """Raises ProbeError."""
        self.take(exchange)
        if self._error is not None:
            raise self._error
        result, end_at = self._result, exchange.end_at - exchange.sent
        result.sent, result.headers = exchange.sent, exchange.headers
        result.headers_at = exchange.headers_at - exchange.sent
        if "event-stream" in exchange.headers.get("content-type", ""):
            self._events.finish(end_at)
        else:
            read_whole(exchange.body.decode(errors="replace"), end_at, result, self._endpoint, path)
        return result


async def closed_loop(
    send: Send, jobs: Iterator[Job], concurrency: int, recorder: Recorder, *, spread: float = 0.0
) -> None:
    """Keep `concurrency` requests in flight until the recorder stops or the jobs end.

    The clients begin evenly over `spread` seconds, so that equal lengths do not make them march in step. What is in
    flight at the stop is dropped, its connections closed.
    """

    async def client(number: int) -> None:
        await asyncio.sleep(spread * number / concurrency)
        for turn, job in enumerate(jobs):
            await _one(send, Outcome(job, time.perf_counter(), first=turn == 0), recorder)

    await _until_stopped([client(number) for number in range(concurrency)], recorder)


async def open_loop(send: Send, jobs: Iterator[Job], rate: float, recorder: Recorder, *, seed: int, most: int) -> bool:
    """Poisson arrivals at `rate` requests per second. True when `most` were in flight at once, which ends the load."""
    rng = random.Random(seed)
    flights: set[asyncio.Task[None]] = set()
    flooded = False

    async def arrivals() -> None:
        nonlocal flooded
        due = time.perf_counter()
        for job in jobs:
            due += rng.expovariate(rate)
            await asyncio.sleep(due - time.perf_counter())
            if len(flights) >= most:
                flooded = True
                recorder.stop.set()
                return
            now = time.perf_counter()
            task = asyncio.create_task(_one(send, Outcome(job, now, late=now - due), recorder))
            flights.add(task)
            task.add_done_callback(flights.discard)
        await asyncio.gather(*flights)

    try:
        await _until_stopped([arrivals()], recorder)
    finally:
        await _cancel(list(flights))
    return flooded


async def _one(send: Send, outcome: Outcome, recorder: Recorder) -> None:
    recorder.sent(outcome)
    try:
        outcome.result = await send(outcome.job, outcome.partial)
    except ProbeError as error:
        outcome.error = error
        await asyncio.sleep(0.05)  # a server that refuses at once must not be flooded in a circle
    outcome.ended = time.perf_counter()
    recorder.done(outcome)


async def _until_stopped(loads: list[Coroutine[Any, Any, None]], recorder: Recorder) -> None:
    """Run them until the recorder stops or all have ended. Raises what one of them raises."""
    tasks = [asyncio.create_task(load) for load in loads]
    stop = asyncio.create_task(recorder.stop.wait())
    ended = asyncio.create_task(asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION))
    try:
        await asyncio.wait([ended, stop], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        stop.cancel()
        ended.cancel()
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
