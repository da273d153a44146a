"""Real servers for tests, on free ports of this machine, each on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from anaphora.engine.loop import EngineLoop
from anaphora.server.run import bind, serve, url_of
from anaphora.server.settings import ServerState


@dataclass(frozen=True)
class Served:
    """A running server as its clients see it, and its state."""

    url: str
    state: ServerState
    stop: Callable[[], None]
    """Begin to drain, as a signal would."""
    thread: threading.Thread

    def client(self, timeout: float = 60.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout, trust_env=False)

    def openai(self, api_key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60)

    def metrics(self) -> dict[str, float]:
        """Samples by name; with labels as in `name{a=b}`."""
        with self.client() as client:
            text = client.get("/metrics").text
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return samples

    def wait_for(self, condition: Callable[[dict[str, float]], bool], seconds: float = 10.0) -> dict[str, float]:
        """Poll the metrics until they meet `condition`; fails after `seconds`."""
        end = time.monotonic() + seconds
        while not condition(samples := self.metrics()):
            assert time.monotonic() < end, samples
            time.sleep(0.02)
        return samples


@contextmanager
def running(
    state: ServerState, *, load: Callable[[], EngineLoop] | None = None, shutdown_timeout: float = 5.0
) -> Iterator[Served]:
    sock = bind("127.0.0.1", 0)
    started = threading.Event()
    stop: list[Callable[[], None]] = []
    failures: list[BaseException] = []

    async def main() -> None:
        event, loop = asyncio.Event(), asyncio.get_running_loop()

        def stop_soon() -> None:
            loop.call_soon_threadsafe(event.set)

        stop.append(stop_soon)
        started.set()
        await serve(state, sock, event, load=load, shutdown_timeout=shutdown_timeout)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    try:
        yield Served(url_of(sock), state, stop[0], thread)
    finally:
        if thread.is_alive():
            stop[0]()
        thread.join(60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
