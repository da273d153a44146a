"""Servers whose knee is known, simulated event by event: no sockets, no clock."""

from __future__ import annotations

import heapq
import random


def closed_mmc(concurrency: int, servers: int, rng: random.Random, *, requests: int = 200) -> list[float]:
    """TTFTs of `concurrency` clients that ask again at once; FIFO, exponential service of mean 1. Knee: servers."""
    free = [0.0] * servers
    asks = [rng.random() * 0.1 for _ in range(concurrency)]
    heapq.heapify(asks)
    found = []
    for _ in range(requests + 2 * concurrency):
        asked = heapq.heappop(asks)
        start = max(asked, heapq.heappop(free))
        end = start + rng.expovariate(1.0)
        heapq.heappush(free, end)
        heapq.heappush(asks, end)
        found.append(start - asked + prefill(rng))
    return found[2 * concurrency :]


def open_mmc(load: float, servers: int, rng: random.Random, *, requests: int = 400) -> list[float]:
    """TTFTs of Poisson arrivals at `load` times the capacity, FIFO queue. Knee: load 1."""
    free = [0.0] * servers
    now, found = 0.0, []
    for _ in range(requests + requests // 4):
        now += rng.expovariate(load * servers)
        start = max(now, heapq.heappop(free))
        heapq.heappush(free, start + rng.expovariate(1.0))
        found.append(start - now + prefill(rng))
    return found[requests // 4 :]


def batch_limited(
    concurrency: int, max_num_seqs: int, rng: random.Random, *, tokens: int = 24, requests: int = 150
) -> list[float]:
    """TTFTs of an engine that steps: a step takes 10 ms and 0.3 ms per running request, and 15 ms per prompt.

    Clients ask again at once, outputs have `tokens` tokens on average. Knee: max_num_seqs.
    """
    now = 0.0
    waiting = [rng.random() * 0.05 for _ in range(concurrency)]
    running: list[tuple[float, int]] = []  # asked, tokens left; asked < 0 once the first token is out
    found: list[float] = []
    while len(found) < requests + 2 * concurrency:
        waiting.sort()
        while waiting and len(running) < max_num_seqs and waiting[0] <= now:
            running.append((waiting.pop(0), 1 + int(rng.expovariate(1 / tokens))))
        if not running:
            now = max(now, waiting[0])
            continue
        prompts = sum(asked >= 0 for asked, _ in running)
        now += (0.010 + 0.0003 * len(running) + 0.015 * prompts) * rng.uniform(0.9, 1.1)
        after: list[tuple[float, int]] = []
        for asked, left in running:
            if asked >= 0:
                found.append(now - asked)
            if left > 1:
                after.append((-1.0, left - 1))
            else:
                waiting.append(now)
        running = after
    return found[2 * concurrency :]


def prefill(rng: random.Random) -> float:
    return 0.05 * rng.lognormvariate(0, 0.15)
