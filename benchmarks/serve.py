"""What the server does over HTTP: start-up, cold and warm TTFT, decode rates, memory.

    python benchmarks/serve.py [--model smollm2-135m] [--trials 20] [--out serve.json]

Starts its own server for every start-up trial and one for the rest; prints a table, writes JSON with machine,
versions and commit. Nothing else should run meanwhile: the figures are of this machine, as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

WORDS = [
    "river",
    "stone",
    "lamp",
    "paper",
    "garden",
    "window",
    "copper",
    "letter",
    "winter",
    "harbour",
    "signal",
    "morning",
    "bridge",
    "candle",
    "engine",
]


@dataclass
class Server:
    """A server process and how to reach it."""

    process: subprocess.Popen[bytes]
    url: str
    started: float

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=600, trust_env=False)

    def wait_ready(self) -> float:
        """Seconds from process start until /health says ready."""
        with self.client() as client:
            while True:
                if self.process.poll() is not None:
                    raise SystemExit(f"the server ended with exit code {self.process.returncode}")
                try:
                    if client.get("/health").status_code == 200:
                        return time.perf_counter() - self.started
                except httpx.HTTPError:
                    pass
                time.sleep(0.02)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)

    def peak_rss(self) -> int:
        """VmHWM in bytes (Linux)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        return int(found[1]) * 1024 if found else 0


def start(model: str, *options: str) -> Server:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "anaphora", "serve", model, "--port", str(port), *options]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return Server(process, f"http://127.0.0.1:{port}", began)


def stream(client: httpx.Client, model: str, prompt: str, max_tokens: int) -> tuple[float, list[float], int, int]:
    """(TTFT, times of content chunks since the request, completion tokens, cached tokens) of one greedy completion."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times: list[float] = []
    usage: dict[str, Any] = {}
    sent = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                if any(choice["text"] for choice in chunk["choices"]):
                    times.append(time.perf_counter() - sent)
    return times[0], times, usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def text_of(client: httpx.Client, tokens: int, seed: int) -> str:
    """Random words that the server counts as just under `tokens` tokens; another seed shares no prefix."""
    rng = random.Random(seed)
    words = [f"{seed}:"] + [rng.choice(WORDS) for _ in range(2 * tokens)]
    low, high = 1, len(words)
    while high - low > 1:
        middle = (low + high) // 2
        reply = client.post("/tokenize", json={"prompt": " ".join(words[:middle])})
        reply.raise_for_status()
        low, high = (middle, high) if reply.json()["count"] <= tokens else (low, middle)
    return " ".join(words[:low])


def spread(values: list[float]) -> dict[str, float]:
    """Median and interquartile range."""
    quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": statistics.median(values), "q1": quarters[0], "q3": quarters[2], "n": len(values)}


def measure_start(model: str, trials: int) -> dict[str, Any]:
    first_token, ready, parts = [], [], []
    for _ in range(trials):
        server = start(model)
        try:
            ready.append(server.wait_ready())
            with server.client() as client:
                stream(client, model, "Once upon a time", 1)
                first_token.append(time.perf_counter() - server.started)
                metrics = client.get("/metrics").text
            parts.append(dict(re.findall(r'anaphora_startup_seconds\{part="([^"]+)"\} (\S+)', metrics)))
        finally:
            server.stop()
    split = {name: statistics.median(float(p[name]) for p in parts) for name in parts[0]}
    return {"seconds_to_first_token": spread(first_token), "seconds_to_ready": spread(ready), "split": split}


def measure_ttft(client: httpx.Client, model: str, tokens: int, trials: int) -> dict[str, Any]:
    """Pairs of a cold prompt and a warm one with the same prefix and another end."""
    cold, warm, cached = [], [], []
    for trial in range(trials):
        prefix = text_of(client, tokens, 1000 + trial)
        cold.append(stream(client, model, prefix + "\nQuestion: what comes first?", 1)[0])
        ttft, _, _, reused = stream(client, model, prefix + "\nAnother question: and what last?", 1)
        warm.append(ttft)
        cached.append(reused)
    ratio = [c / w for c, w in zip(cold, warm, strict=True)]
    return {
        "prefix_tokens": tokens,
        "cold_seconds": spread(cold),
        "warm_seconds": spread(warm),
        "cold_over_warm": spread(ratio),
        "cached_tokens_median": statistics.median(cached),
    }


def measure_decode(server: Server, model: str, streams: int, new_tokens: int, trials: int) -> dict[str, float]:
    """Tokens per second in all, between the moment every stream has its first token and the first one's end."""
    rates = []
    for trial in range(trials):
        with server.client() as client:
            prompts = [text_of(client, 128, 50_000 + 1000 * trial + i) for i in range(streams)]
        starts: list[float] = []
        lock = threading.Barrier(streams)

        def one(
            prompt: str, lock: threading.Barrier = lock, starts: list[float] = starts
        ) -> tuple[float, list[float], int]:
            with server.client() as client:
                lock.wait()
                sent = time.perf_counter()
                starts.append(sent)
                _, times, made, _ = stream(client, model, prompt, new_tokens)
                return sent, times, made

        with ThreadPoolExecutor(streams) as pool:
            results = list(pool.map(one, prompts))
        begin = max(sent + times[0] for sent, times, _ in results)
        end = min(sent + times[-1] for sent, times, _ in results)
        inside = sum(sum(begin < sent + t <= end for t in times) for sent, times, _ in results)
        rates.append(inside / (end - begin))
    return spread(rates)


def machine() -> dict[str, Any]:
    cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("anaphora", "torch", "tokenizers", "fastapi", "uvicorn")},
        "commit": commit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--trials", type=int, default=20, help="cold/warm pairs")
    parser.add_argument("--repeats", type=int, default=5, help="of start-up and decode measurements")
    parser.add_argument("--prefix-tokens", type=int, default=2000)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("serve.json"))
    args = parser.parse_args()

    report: dict[str, Any] = {"schema_version": 1, "benchmark": "serve", "model": args.model, "machine": machine()}
    report["load_before"] = os.getloadavg()
    report["start"] = measure_start(args.model, args.repeats)
    server = start(args.model)
    try:
        server.wait_ready()
        with server.client() as client:
            report["ttft"] = measure_ttft(client, args.model, args.prefix_tokens, args.trials)
        report["decode_tokens_per_second"] = {
            str(streams): measure_decode(server, args.model, streams, args.new_tokens, args.repeats)
            for streams in (1, 8, 32)
        }
        report["peak_rss_bytes"] = server.peak_rss()
    finally:
        server.stop()
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
