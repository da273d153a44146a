"""What the checks of one URL share: what the user gave, what earlier checks learnt."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from anaphora.probes.answers import from_transport
from anaphora.probes.client import ProbeClient
from anaphora.probes.doctor.finding import Finding
from anaphora.probes.endpoint import Endpoint
from anaphora.probes.engines import Engine
from anaphora.probes.stream import StreamResult

GET_SECONDS = 15.0
"""Longest silence that a small GET is waited for."""
_SYLLABLES = ("ka", "lo", "mi", "ren", "sul", "tav", "bo", "nik", "der", "pa")


@dataclass(slots=True)
class Outcome:
    """What one check found."""

    evidence: str
    findings: tuple[Finding, ...] = ()
    stop: bool = False
    """What depends on this check makes no sense now."""
    unreachable: bool = False


@dataclass(slots=True)
class Visit:
    """One URL under examination. Checks fill the lower half in order."""

    url: str
    api_key: str | None = None
    model: str | None = None
    headers: tuple[str, ...] = ()
    timeout: float = 60.0
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    context_words: int = 6400
    """Length of the longest prompt sent to find silent truncation; 0 = none."""
    slow_seconds: float = 5.0
    """A first chunk later than this, for a prompt of a few tokens, is slow."""

    endpoint: Endpoint = field(default_factory=lambda: Endpoint("http://nowhere", "http://nowhere/v1"))
    client: ProbeClient | None = None
    engine: Engine = field(default_factory=Engine)
    models_answer: httpx.Response | None = None
    """What GET /v1/models said."""
    entries: list[dict[str, Any]] = field(default_factory=list)
    chosen: str = ""
    """The model that is asked."""
    completion: dict[str, Any] = field(default_factory=dict)
    stream: StreamResult | None = None
    limit: int | None = None
    """Context in tokens, as far as known."""
    tokens_per_word: float = 1.5
    """Of made-up words (see filler), measured by the context check."""
    seconds_per_token: float = 0.0
    """Of reading a prompt, measured likewise."""

    @property
    def http(self) -> ProbeClient:
        """The client that the URL check made."""
        if self.client is None:
            raise RuntimeError("the URL check comes first")
        return self.client

    @property
    def where(self) -> str:
        return f"{self.endpoint.host}:{self.endpoint.port}"

    @property
    def no_proxy(self) -> str:
        """What to type so that nothing sends this host's requests to a proxy."""
        old = self.environ.get("no_proxy") or self.environ.get("NO_PROXY") or ""
        value = ",".join(part for part in (old, self.endpoint.host) if part)
        return f"export NO_PROXY={value} no_proxy={value}"

    async def send(
        self,
        method: str,
        url: str,
        *,
        body: Any = None,
        headers: Mapping[str, str | None] | None = None,
        timeout: float = GET_SECONDS,
    ) -> httpx.Response:
        """One request to a whole URL; headers of None are left out. Raises ProbeError."""
        client = self.http.http
        try:
            request = client.build_request(method, url, json=body, timeout=min(timeout, self.timeout))
            for name, value in (headers or {}).items():
                if value is None:
                    request.headers.pop(name, None)
                else:
                    request.headers[name] = value
            return await client.send(request)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise from_transport(error, self.endpoint, streaming=False) from error

    async def chat(
        self, messages: list[dict[str, str]], max_tokens: int, headers: Mapping[str, str | None] | None = None
    ) -> httpx.Response:
        """One greedy chat that is not streamed, whatever its status. Raises ProbeError."""
        url = self.endpoint.api_base + "/chat/completions"

        def body() -> dict[str, Any]:
            fields = {"model": self.chosen, "messages": messages, "temperature": 0}
            return {**fields, self.http.token_limit_field: max_tokens}

        answer = await self.send("POST", url, body=body(), headers=headers, timeout=self.timeout)
        newer = "max_completion_tokens"
        if answer.status_code in (400, 422) and self.http.token_limit_field != newer and newer in answer.text:
            self.http.token_limit_field = newer
            answer = await self.send("POST", url, body=body(), headers=headers, timeout=self.timeout)
        return answer


def filler(rng: random.Random, words: int) -> str:
    """Words that mean nothing and that no cache has seen."""
    return " ".join("".join(rng.choices(_SYLLABLES, k=2)) for _ in range(words))


def user(text: str) -> list[dict[str, str]]:
    """A chat of one message."""
    return [{"role": "user", "content": text}]
