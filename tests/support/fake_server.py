"""An OpenAI-compatible server that lies on demand: real sockets and real SSE, invented tokens and times.

A token is a word; prefill takes `seconds_per_token` for every token that is not reused. Extend it by knobs.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from anaphora.server.run import bind, url_of

Words = tuple[str, ...]


@dataclass
class Fake:
    """Knobs first, then what was seen."""

    granularity: int | None = 16
    """Reuse in steps of so many tokens; None = no prefix cache."""
    min_prefix: int = 0
    """Shorter matches are not reused at all."""
    capacity: int | None = None
    """Prompts kept per replica, oldest dropped first; 1 is an engine with one slot."""
    replicas: int = 1
    routing: Literal["random", "round_robin"] = "random"
    seconds_per_token: float = 5e-5
    overhead: float = 0.002
    decode_seconds: float = 0.001
    noise: float = 0.0
    """Standard deviation of the time of an answer, as a share of it."""
    buffered: bool = False
    """A proxy that hands the stream over in one piece at its end."""
    usage: bool = True
    cached_tokens: Literal["honest", "missing", "zero", "everything"] = "honest"
    counters: Literal["honest", "missing", "zero", "everything"] = "honest"
    tokenize: bool = True
    template: int = 4
    """Tokens that the chat template puts in front."""
    max_prompt: int | None = None
    """Longer prompts are cut at their head, silently."""
    max_num_seqs: int | None = None
    """Requests that run at once; the others wait, first come first served."""
    kv_tokens: int | None = None
    """KV memory: a request waits until its prompt and output fit."""
    crowding: float = 0.0
    """Share by which each further running request slows every token down; 1 is a processor that is shared."""
    refuse_above: int | None = None
    """429 for requests beyond so many in the house."""
    api_key: str | None = None
    models: tuple[str, ...] = ("fake",)
    seed: int = 0

    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the chats received."""
    hits: float = 0
    queries: float = 0
    caches: list[list[Words]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.caches = [[] for _ in range(self.replicas)]
        self.turn = 0

        self.running = self.waiting = 0
        self.used_tokens = 0
        self.left = asyncio.Condition()

    @asynccontextmanager
    async def place(self, tokens: int) -> AsyncIterator[None]:
        """A place in the batch and in the KV memory."""
        self.waiting += 1
        try:
            async with self.left:
                await self.left.wait_for(lambda: self._room(tokens))
                self.running += 1
                self.used_tokens += tokens
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self.running -= 1
            self.used_tokens -= tokens
            async with self.left:
                self.left.notify_all()

    def _room(self, tokens: int) -> bool:
        free = self.max_num_seqs is None or self.running < self.max_num_seqs
        return free and (self.kv_tokens is None or self.used_tokens + tokens <= self.kv_tokens)

    def words(self, messages: list[dict[str, Any]]) -> Words:
        text = "".join(f"\n<{m['role']}> {m['content']}" for m in messages)
        found = tuple(f"<t{i}>" for i in range(self.template)) + tuple(re.findall(r"\S+\s*", text))
        return found[-self.max_prompt :] if self.max_prompt else found

    def reuse(self, prompt: Words) -> int:
        """Tokens reused by the replica that this request goes to, which then keeps the prompt."""
        if self.routing == "random":
            cache = self.rng.choice(self.caches)
        else:
            cache = self.caches[self.turn % self.replicas]
            self.turn += 1
        common = max((_common(prompt, old) for old in cache), default=0)
        cache.append(prompt)
        if self.capacity is not None:
            del cache[: -self.capacity]
        if self.granularity is None or common < self.min_prefix:
            return 0
        return min(common, len(prompt) - 1) // self.granularity * self.granularity


def _common(a: Words, b: Words) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _told(how: str, honest: int, prompt: int) -> int | None:
    return {"honest": honest, "missing": None, "zero": 0, "everything": prompt}[how]


def make_app(fake: Fake) -> Starlette:
    async def chat(request: Request) -> Response:
        if fake.api_key and request.headers.get("authorization") != f"Bearer {fake.api_key}":
            return JSONResponse({"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}}, 401)
        body = await request.json()
        if "model" not in body:
            return JSONResponse({"error": {"message": "model: field required", "code": "invalid_request"}}, 400)
        fake.requests.append(body)
        if fake.refuse_above is not None and fake.running + fake.waiting >= fake.refuse_above:
            return JSONResponse({"error": {"message": "Too many requests"}}, 429)
        if body["model"] not in fake.models:
            return JSONResponse({"error": {"message": "no such model", "code": "model_not_found"}}, 404)
        prompt = fake.words(body["messages"])
        reused = fake.reuse(prompt)
        fake.queries += len(prompt)
        fake.hits += _told(fake.counters, reused, len(prompt)) or 0
        wait = fake.overhead + fake.seconds_per_token * (len(prompt) - reused)
        wait *= max(0.1, fake.rng.gauss(1, fake.noise))
        tokens = int(body.get("max_tokens") or 16)
        usage = _usage(fake, len(prompt), tokens, reused)
        if not body.get("stream"):
            async with fake.place(len(prompt) + tokens):
                await asyncio.sleep(wait + tokens * fake.decode_seconds)
            message = {"role": "assistant", "content": "word " * tokens}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"]}
            return JSONResponse({**head, "choices": [choice], **usage})
        events = _events(fake, wait, len(prompt), tokens, usage)
        if fake.buffered:
            whole = b"".join([event async for event in events])
            return Response(whole, media_type="text/event-stream")
        return StreamingResponse(events, media_type="text/event-stream")

    async def metrics(_: Request) -> Response:
        if fake.counters == "missing":
            return PlainTextResponse("not found", 404)
        lines = [
            f'vllm:prefix_cache_queries_total{{engine="0"}} {fake.queries}',
            f'vllm:prefix_cache_hits_total{{engine="0"}} {fake.hits}',
            f'vllm:num_requests_running{{engine="0"}} {fake.running}',
            f'vllm:num_requests_waiting{{engine="0"}} {fake.waiting}',
        ]
        if fake.kv_tokens is not None:
            lines.append(f'vllm:kv_cache_usage_perc{{engine="0"}} {fake.used_tokens / fake.kv_tokens}')
        return PlainTextResponse("\n".join(lines) + "\n")

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "owned_by": "vllm"} for name in fake.models]})

    async def version(_: Request) -> Response:
        return JSONResponse({"version": "0.33.0"})

    async def tokenize(request: Request) -> Response:
        if not fake.tokenize:
            return JSONResponse({"detail": "Not Found"}, 404)
        return JSONResponse({"count": len(re.findall(r"\S+\s*", (await request.json())["prompt"]))})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/metrics", metrics),
            Route("/version", version),
            Route("/tokenize", tokenize, methods=["POST"]),
        ]
    )


def _usage(fake: Fake, prompt: int, tokens: int, reused: int) -> dict[str, Any]:
    if not fake.usage:
        return {}
    told = _told(fake.cached_tokens, reused, prompt)
    details = {} if told is None else {"prompt_tokens_details": {"cached_tokens": told}}
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": tokens, **details}}


async def _events(fake: Fake, wait: float, prompt: int, tokens: int, usage: dict[str, Any]) -> AsyncIterator[bytes]:
    def event(**chunk: Any) -> bytes:
        return f"data: {json.dumps({'object': 'chat.completion.chunk', **chunk})}\n\n".encode()

    def crowded(seconds: float) -> float:
        return seconds * (1 + fake.crowding * max(0, fake.running - 1))

    async with fake.place(prompt + tokens):
        await asyncio.sleep(crowded(wait))
        yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        for _ in range(tokens):
            yield event(choices=[{"index": 0, "delta": {"content": "word "}, "finish_reason": None}])
            await asyncio.sleep(crowded(fake.decode_seconds))
        yield event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
        if usage:
            yield event(choices=[], **usage)
        yield b"data: [DONE]\n\n"


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def serving(fake: Fake | None = None, app: Any = None) -> Iterator[str]:
    """Base URL of a fake (or of any ASGI app) that runs on a thread of its own."""
    sock = bind("127.0.0.1", 0)
    config = uvicorn.Config(app or make_app(fake or Fake()), log_config=None, lifespan="off", access_log=False)
    server = _Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    try:
        yield url_of(sock)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
