"""What the load generator adds to the latencies it measures: 64 streams at 2000 chunks/s in all, on one core.

    python benchmarks/load_generator.py [--streams 64] [--chunks-per-second 2000] [--seconds 10] [--out load.json]

A bare server on another core writes into every chunk the time it was handed to the kernel; what the client notes is
compared with that. Both ways an engine can stream are tried: all streams in the same instant (one batch step), and
each on its own. Only the generator's process is pinned; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import random
import time
from collections.abc import Iterator
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from anaphora.probes.client import ProbeClient
from anaphora.probes.endpoint import Endpoint
from anaphora.probes.load import Outcome, Sender, closed_loop
from anaphora.probes.statistics import quantile
from anaphora.probes.stream import StreamResult
from anaphora.probes.workload import Job

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def frame(payload: bytes) -> bytes:
    data = b"data: " + payload + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def content(text: str, finish: str | None = None) -> bytes:
    """A chunk as large as vLLM's."""
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish, "token_ids": None}
    head = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion.chunk", "created": 1}
    return frame(json.dumps({**head, "model": "stamps", "choices": [choice]}).encode())


async def serve(pipe: Connection, interval: float, chunks: int, together: bool) -> None:
    """Streams `chunks` chunks, one each `interval` seconds, that hold the nanosecond at which they were written."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.split(b":")[1]))
                writer.write(HEAD)
                start = loop.time()
                start = (start // interval + 1) * interval if together else start + random.random() * interval
                for n in range(chunks):
                    await asyncio.sleep(start + n * interval - loop.time())
                    writer.write(content(f"{time.perf_counter_ns()} "))
                writer.write(content("", "length") + frame(b"[DONE]") + b"0\r\n\r\n")
        writer.close()

    loop = asyncio.get_running_loop()
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def run_server(pipe: Connection, interval: float, chunks: int, together: bool, cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)
    asyncio.run(serve(pipe, interval, chunks, together))


@contextlib.contextmanager
def server(interval: float, chunks: int, together: bool, cores: set[int]) -> Iterator[str]:
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_server, args=(there, interval, chunks, together, cores), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.kill()
        process.join()


class Recorder:
    """Keeps the answers; the load ends when its jobs do."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.results: list[StreamResult] = []

    def sent(self, outcome: Outcome) -> None:
        pass

    def done(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            raise SystemExit(str(outcome.error))
        if outcome.result is not None:
            self.results.append(outcome.result)


async def drive(url: str, streams: int) -> tuple[list[StreamResult], float]:
    """One request per stream, and the share of a core they took."""
    recorder = Recorder()
    jobs = iter([Job([{"role": "user", "content": "go"}], 1, 1)] * streams)
    async with ProbeClient(Endpoint.parse(url, environ={})) as client, Sender(client, "stamps") as sender:
        began, cpu = time.perf_counter(), time.process_time()
        await closed_loop(sender, jobs, streams, recorder)
        share = (time.process_time() - cpu) / (time.perf_counter() - began)
    return recorder.results, share


def added(results: list[StreamResult]) -> dict[str, Any]:
    """Milliseconds between the kernel and the note, and by how much a gap differs from the true one."""
    late, gaps = [], []
    for result in results:
        stamps = [int(word) / 1e9 for word in result.text.split()]
        notes = [result.sent + at for at in result.chunk_times]
        late += [1e3 * (note - stamp) for note, stamp in zip(notes, stamps, strict=True)]
        gaps += [1e3 * abs((b - a) - (d - c)) for (a, b), (c, d) in zip(pairwise(notes), pairwise(stamps), strict=True)]
    marks = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    return {
        "chunks": len(late),
        "late_ms": {name: round(quantile(late, q), 3) for name, q in marks.items()},
        "added_itl_ms": {name: round(quantile(gaps, q), 3) for name, q in marks.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--chunks-per-second", type=float, default=2000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    interval = options.streams / options.chunks_per_second
    report: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "streams": options.streams,
        "chunks_per_second": options.chunks_per_second,
    }
    os.sched_setaffinity(0, {cores[0]})
    for name, together in (("together", True), ("each_on_its_own", False)):
        with server(interval, round(options.seconds / interval), together, set(cores[1:]) or set(cores)) as url:
            results, share = asyncio.run(drive(url, options.streams))
        report[name] = {"core_share": round(share, 3), **added(results)}
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
