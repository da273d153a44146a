"""An engine's HTTP server as a process of its own: start, warm TTFT, peak memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

READY_TIMEOUT = 600.0


class ServerFailed(Exception):
    """It ended, or did not get ready in time; the message ends with its last words."""


class Server:
    """Started at once, ready later; `stop` ends it. `command` gets the port it must listen on."""

    def __init__(self, command: Callable[[int], list[str]], environ: Mapping[str, str], log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.log = log
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=READY_TIMEOUT, trust_env=False)
        self.began = time.perf_counter()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command(port),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=os.environ | dict(environ),
                start_new_session=True,
            )
        self.model = ""

    def wait_ready(self) -> None:
        """Until /health says so and /v1/models names the model. Raises ServerFailed."""
        while time.perf_counter() - self.began < READY_TIMEOUT:
            if self.process.poll() is not None:
                raise ServerFailed(f"the server ended with exit code {self.process.returncode}: {last_words(self.log)}")
            with contextlib.suppress(httpx.HTTPError):
                if self.client.get("/health", timeout=5).status_code == 200:
                    self.model = self.client.get("/v1/models").json()["data"][0]["id"]
                    return
            time.sleep(0.02)
        raise ServerFailed(f"the server was not ready after {READY_TIMEOUT:.0f} s: {last_words(self.log)}")

    def first_token(self, prompt: list[int], max_tokens: int = 4) -> float:
        """Seconds from sending the request to the first chunk with text. Raises ServerFailed."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": True,
        }
        sent = time.perf_counter()
        first = None
        with self.client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                raise ServerFailed(f"HTTP {reply.status_code}: {reply.read().decode(errors='replace')[:300]}")
            for line in reply.iter_lines():
                if first is None and line.startswith("data: {"):
                    choices = json.loads(line[6:]).get("choices") or [{}]
                    if choices[0].get("text"):
                        first = time.perf_counter() - sent
        if first is None:
            raise ServerFailed("the answer held no text")
        return first

    def burst(self, prompts: list[list[int]], max_tokens: int) -> None:
        """All prompts at once; for what it does to memory."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda prompt: self.first_token(prompt, max_tokens), prompts))

    def peak_rss(self) -> int:
        """Bytes: VmHWM of the process and its children, added up (Linux)."""
        return sum(_peak_rss(pid) for pid in _tree(self.process.pid))

    def stop(self) -> None:
        self.client.close()
        end_session(self.process)


def end_session(process: subprocess.Popen[Any], patience: float = 30.0) -> None:
    """End a process that leads a session, and whatever it started there: vLLM's workers outlive their server."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_words(log: Path) -> str:
    """The last lines of a log that say something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-400:] or "it said nothing"


def _tree(pid: int) -> Iterator[int]:
    yield pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    with contextlib.suppress(OSError):
        for child in children.read_text().split():
            yield from _tree(int(child))


def _peak_rss(pid: int) -> int:
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) * 1024 if found else 0
    return 0
