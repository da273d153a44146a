"""Made-up traffic with known habits, to try a cache on before there is a trace. The same seed gives the same trace.

Hash ids are chained as in a real trace: an id stands for its block and all before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from random import Random

from anaphora.replay.readers.base import TraceRequest

BLOCK_SIZE = 512


def scans(num_requests: int, seed: int = 0, blocks: int = 24) -> Iterator[TraceRequest]:
    """Documents read once, behind one shared system prompt of two blocks."""
    ids = _Ids()
    head = ids.take(2)
    for i in range(num_requests):
        yield _request(i, head + ids.take(blocks - 2))


def loop(num_requests: int, seed: int = 0, prompts: int = 200, blocks: int = 24) -> Iterator[TraceRequest]:
    """The same prompts round and round: what LRU is worst at when they do not all fit."""
    ids = _Ids()
    known = [ids.take(blocks) for _ in range(prompts)]
    for i in range(num_requests):
        yield _request(i, known[i % prompts])


def zipf(
    num_requests: int, seed: int = 0, prompts: int = 5000, exponent: float = 0.9, blocks: int = 8
) -> Iterator[TraceRequest]:
    """Independent draws of prompts, the k-th most popular with weight k ** -exponent."""
    random, ids = Random(seed), _Ids()
    known = [ids.take(1 + random.randrange(2 * blocks)) for _ in range(prompts)]
    weights = [(k + 1) ** -exponent for k in range(prompts)]
    for i, prompt in enumerate(random.choices(known, weights, k=num_requests)):
        yield _request(i, prompt)


def shifting(num_requests: int, seed: int = 0, period: int = 2000) -> Iterator[TraceRequest]:
    """Zipf traffic whose favourites are new ones every `period` requests."""
    last, shift = 0, 0
    for start in range(0, num_requests, period):
        for request in zipf(min(period, num_requests - start), seed + start, prompts=1000):
            ids = [i + shift for i in request.hash_ids or ()]
            last = max(last, *ids)
            yield _request(start + int(request.arrival * RATE), ids)
        shift = last + 1


def chat(
    num_requests: int, seed: int = 0, more: float = 0.6, think: float = 90.0, one_shot: float = 0.4
) -> Iterator[TraceRequest]:
    """Conversations among one-shot prompts; after each turn another comes with probability `more`."""
    return _sessions(num_requests, seed, lambda random: _geometric(random, more, one_shot), think, spread=1.0, growth=3)


def agents(num_requests: int, seed: int = 0, turns: int = 30, think: float = 15.0) -> Iterator[TraceRequest]:
    """Agents of `turns` steps that add two blocks each, quickly, and half as many one-shot prompts."""
    return _sessions(
        num_requests, seed, lambda random: turns if random.random() < 2 / 3 else 1, think, spread=0.5, growth=2
    )


def mixed(num_requests: int, seed: int = 0) -> Iterator[TraceRequest]:
    """Chats with a scan of 24-block documents in between every third request."""
    shift = 1 << 40
    talk, read = chat(num_requests, seed), scans(num_requests, seed)
    for i in range(num_requests):
        request = next(read) if i % 3 == 2 else next(talk)
        ids = [j + (shift if i % 3 == 2 else 0) for j in request.hash_ids or ()]
        yield _request(i, ids)


GENERATORS: dict[str, Callable[[int, int], Iterator[TraceRequest]]] = {
    "scans": scans,
    "loop": loop,
    "zipf": zipf,
    "shifting": shifting,
    "chat": chat,
    "agents": agents,
    "mixed": mixed,
}
"""(number of requests, seed) -> requests."""

RATE = 4.0
"""Requests per second of every trace here."""


class _Ids:
    """Fresh hash ids."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def _request(number: int, ids: list[int], session: str = "") -> TraceRequest:
    return TraceRequest(number / RATE, len(ids) * BLOCK_SIZE, 256, ids, BLOCK_SIZE, session=session)


def _geometric(random: Random, more: float, one_shot: float) -> int:
    turns = 1
    if random.random() >= one_shot:
        while random.random() < more:
            turns += 1
    return turns


def _sessions(
    num_requests: int, seed: int, turns: Callable[[Random], int], think: float, spread: float, growth: int
) -> Iterator[TraceRequest]:
    """Sessions start so that there are RATE requests a second; think times are log-normal around `think` seconds."""
    random, ids = Random(seed), _Ids()
    head = ids.take(1)
    waiting: list[tuple[float, int, int, list[int]]] = []
    now = 0.0
    for number in range(num_requests):
        now = number / RATE
        if waiting and waiting[0][0] <= now:
            _, session, left, prompt = heappop(waiting)
            prompt = prompt + ids.take(1 + random.randrange(2 * growth - 1))
        else:
            session, left, prompt = number, turns(random), head + ids.take(1 + int(random.expovariate(1 / 12)))
        yield _request(number, prompt, str(session))
        if left > 1:
            pause = think * random.lognormvariate(0.0, spread)
            heappush(waiting, (now + pause, session, left - 1, prompt))
