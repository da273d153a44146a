"""The load generator: what it reads from real sockets, and that its loops do what they say."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from anaphora.errors import EndpointTimeout, ProbeError
from anaphora.probes.client import ProbeClient
from anaphora.probes.endpoint import Endpoint
from anaphora.probes.load import Outcome, Sender, closed_loop, open_loop
from anaphora.probes.stream import StreamResult
from anaphora.probes.workload import Job

JOB = Job([{"role": "user", "content": "hello"}], 5, 4)
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

STREAM = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: {"choices":[{"delta":{"content":"b"}}]}\n\n'
END = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x;name=value\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nTrailer: 1\r\n\r\n"


WHOLE = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(STREAM, END, b"data: [DONE]\n\n")


@asynccontextmanager
async def answering(answer: Answer, timeout: float = 5.0) -> AsyncIterator[tuple[Sender, list[int]]]:
    """A sender to a raw server that calls `answer` for each request, and the requests per connection."""
    counts: list[int] = []
    handlers: list[asyncio.Task[object] | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        counts.append(0)
        number = len(counts) - 1
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))
                counts[number] += 1
                await answer(reader, writer)
        writer.close()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    endpoint = Endpoint.parse(f"http://127.0.0.1:{port}", api_key="sk-secret-key", environ={}, timeout=timeout)
    try:
        async with ProbeClient(endpoint) as client, Sender(client, "m") as sender:
            yield sender, counts
    finally:
        server.close()
        running = [task for task in handlers if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def writes(*pieces: bytes, close: bool = False) -> Answer:
    """Each piece in a segment of its own."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.002)
        if close:
            writer.close()

    return answer


def one(answer: Answer, timeout: float = 5.0) -> StreamResult:
    async def run() -> StreamResult:
        async with answering(answer, timeout) as (send, _):
            return await send(JOB, StreamResult(0.0))

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_a_stream_is_read_whole_however_it_is_cut(size: int) -> None:
    result = one(writes(*(WHOLE[i : i + size] for i in range(0, len(WHOLE), size))))
    assert (result.text, result.finish_reason, result.done) == ("ab", "stop", True)
    assert (result.prompt_tokens, result.completion_tokens) == (7, 2)
    assert 0 < result.headers_at <= result.ttft <= result.e2e <= result.end_at


def test_chunks_have_the_times_at_which_they_came() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        events = [STREAM[: len(STREAM) // 2], STREAM[len(STREAM) // 2 :], END]
        writer.write(HEAD + b"\r\n")
        for event in events:
            await asyncio.sleep(0.05)
            writer.write(event)
        writer.close()

    result = one(answer)
    assert result.ttft >= 0.045
    assert len(result.itls) == 1
    assert result.itls[0] >= 0.045


@pytest.mark.parametrize(
    "answer",
    [
        writes(HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM + END) + STREAM + END),
        writes(HEAD + b"\r\n" + STREAM + END, close=True),
        writes(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + WHOLE),
    ],
    ids=["counted", "until close", "interim answers"],
)
def test_other_framings(answer: Answer) -> None:
    assert one(answer).text == "ab"


def test_an_answer_that_is_no_stream() -> None:
    body = b'{"choices":[{"message":{"content":"ab"},"finish_reason":"stop"}]}'
    result = one(writes(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 65\r\n\r\n" + body))
    assert not result.incremental
    assert result.text == "ab"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (writes(b"HTTP/1.1 429 Too Many\r\nContent-Length: 2\r\n\r\n{}"), "http_429"),
        (writes(b"HTTP/1.1 503 No\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"busy")), "http_503"),
        (writes(HEAD + b"\r\n<html><body>login</body></html>", close=True), "html"),
        (writes(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(STREAM)[:-30], close=True), "stream_cut"),
        (writes(HEAD + b"\r\n" + STREAM, close=True), "stream_cut"),
        (writes(HEAD + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n"), "stream_cut"),
        (writes(b"220 smtp.example.org ESMTP\r\n"), "protocol"),
        (writes(b"HTTP/1.1 200 OK\r\n", close=True), "reset"),
        (writes(close=True), "reset"),
    ],
)
def test_failures_have_the_same_kinds_as_elsewhere(answer: Answer, kind: str) -> None:
    with pytest.raises(ProbeError) as caught:
        one(answer)
    assert caught.value.kind == kind
    assert "sk-secret" not in str(caught.value)


def test_what_came_is_there_while_the_rest_is_awaited() -> None:
    async def half(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\n" + STREAM)
        await asyncio.sleep(5)

    async def run() -> StreamResult:
        async with answering(half) as (send, _):
            result = StreamResult(0.0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(send(JOB, result), 0.3)
        return result

    result = asyncio.run(run())
    assert result.text == "ab"
    assert len(result.chunk_times) == 2


def test_silence_is_a_timeout_but_slow_bytes_are_not() -> None:
    async def silent(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2)

    with pytest.raises(EndpointTimeout):
        one(silent, timeout=0.2)
    size = len(WHOLE) // 8 + 1

    async def slow(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for i in range(0, len(WHOLE), size):
            writer.write(WHOLE[i : i + size])
            await asyncio.sleep(0.1)

    assert one(slow, timeout=0.5).text == "ab"


def test_a_refused_connection_says_so() -> None:
    async def run() -> None:
        async with answering(writes(WHOLE)) as (send, _):
            await send(JOB, StreamResult(0.0))
            endpoint = Endpoint.parse("http://127.0.0.1:9", environ={})
            async with ProbeClient(endpoint) as client, Sender(client, "m") as other:
                await other(JOB, StreamResult(0.0))

    with pytest.raises(ProbeError) as caught:
        asyncio.run(run())
    assert caught.value.kind == "refused"


def test_connections_are_kept_and_stale_ones_replaced() -> None:
    async def run() -> list[int]:
        async with answering(writes(WHOLE)) as (send, counts):
            for _ in range(3):
                await send(JOB, StreamResult(0.0))
        return counts

    assert asyncio.run(run()) == [3]

    async def idle_close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE)
        await asyncio.sleep(0.01)
        writer.close()

    async def run_stale() -> list[int]:
        async with answering(idle_close) as (send, counts):
            await send(JOB, StreamResult(0.0))
            await asyncio.sleep(0.05)
            assert (await send(JOB, StreamResult(0.0))).text == "ab"
        return counts

    assert asyncio.run(run_stale()) == [1, 1]


class Kept:
    """A recorder that stops after so many requests are done."""

    def __init__(self, after: int | None = None) -> None:
        self.stop = asyncio.Event()
        self.after = after
        self.flights = self.most = 0
        self.outcomes: list[Outcome] = []
        self.finished: list[Outcome] = []

    def sent(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.flights += 1
        self.most = max(self.most, self.flights)

    def done(self, outcome: Outcome) -> None:
        self.finished.append(outcome)
        self.flights -= 1
        if self.after is not None and len(self.finished) >= self.after:
            self.stop.set()


async def quick(_: Job, __: StreamResult) -> StreamResult:
    await asyncio.sleep(0.005)
    return StreamResult(time.perf_counter(), chunk_times=[0.005])


def jobs(count: int | None = None) -> Iterator[Job]:
    return itertools.repeat(JOB) if count is None else itertools.repeat(JOB, count)


def test_the_closed_loop_keeps_n_in_flight_and_marks_first_requests() -> None:
    async def run() -> Kept:
        kept = Kept(after=60)
        await closed_loop(quick, jobs(), 6, kept)
        return kept

    kept = asyncio.run(run())
    assert kept.most == 6
    assert sum(outcome.first for outcome in kept.outcomes) == 6
    assert all(outcome.first for outcome in kept.outcomes[:6])


def test_the_closed_loop_ends_with_its_jobs_and_spreads_its_start() -> None:
    async def run() -> Kept:
        kept = Kept()
        await closed_loop(quick, jobs(10), 5, kept, spread=0.1)
        return kept

    kept = asyncio.run(run())
    assert len(kept.finished) == 10
    starts = [outcome.started for outcome in kept.outcomes if outcome.first]
    assert max(starts) - min(starts) >= 0.01


def test_errors_are_recorded_and_do_not_end_the_load() -> None:
    async def failing(_: Job, __: StreamResult) -> StreamResult:
        raise ProbeError("no", kind="http_500")

    async def run() -> Kept:
        kept = Kept(after=8)
        await closed_loop(failing, jobs(), 4, kept)
        return kept

    kept = asyncio.run(run())
    assert [outcome.error.kind for outcome in kept.finished if outcome.error] == ["http_500"] * 8


def test_the_open_loop_is_poisson_and_does_not_wait_for_answers() -> None:
    rate = 400.0

    async def run() -> Kept:
        kept = Kept()
        assert not await open_loop(quick, jobs(400), rate, kept, seed=3, most=10_000)
        return kept

    kept = asyncio.run(run())
    assert len(kept.finished) == 400
    due = [outcome.started - outcome.late for outcome in kept.outcomes]
    gaps = [b - a for a, b in itertools.pairwise(due)]
    mean = statistics.mean(gaps)
    assert mean == pytest.approx(1 / rate, rel=0.2)  # 20% are four standard errors
    assert statistics.stdev(gaps) / mean == pytest.approx(1, abs=0.25)  # exponential gaps: coefficient 1
    assert all(outcome.late >= 0 for outcome in kept.outcomes)


def test_the_open_loop_ends_when_it_is_flooded() -> None:
    async def hangs(_: Job, __: StreamResult) -> StreamResult:
        await asyncio.sleep(30)
        raise AssertionError

    async def run() -> tuple[bool, Kept]:
        kept = Kept()
        return await open_loop(hangs, jobs(), 2000.0, kept, seed=1, most=20), kept

    flooded, kept = asyncio.run(run())
    assert flooded
    assert (kept.most, len(kept.finished)) == (20, 0)
