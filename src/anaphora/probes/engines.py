"""Which engine answers here, from its own words, and how sure that is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from anaphora.errors import ProbeError
from anaphora.probes.client import ProbeClient

Sureness = Literal["certain", "likely", "guess", "unknown"]

ROUTES = ("/version", "/metrics", "/props", "/api/version", "/server_info", "/get_server_info", "/health", "/v1/models")
"""What is asked; all of them are harmless GETs."""

TITLES = {
    "anaphora": "Anaphora",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp (llama-server)",
    "ollama": "Ollama",
    "transformers": "transformers serve",
    "hosted": "a hosted API",
    "unknown": "an unknown server",
}

GATEWAYS = {
    "x-litellm-version": "LiteLLM",
    "x-litellm-model-id": "LiteLLM",
    "x-litellm-call-id": "LiteLLM",
    "x-portkey-trace-id": "Portkey",
    "x-kong-proxy-latency": "Kong",
    "x-envoy-upstream-service-time": "Envoy",
    "cf-aig-cache-status": "Cloudflare AI Gateway",
}
"""A header of an answer -> the gateway that adds it."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What was found out. `name` is a key of TITLES."""

    name: str = "unknown"
    version: str | None = None
    sure: Sureness = "unknown"
    gateway: str | None = None
    """A gateway seen before (or instead of) the engine."""
    evidence: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        name = TITLES[self.name] + (f" {self.version}" if self.version else "")
        return f"{name} behind {self.gateway}" if self.gateway else name

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "title": self.title}


@dataclass(slots=True)
class Answers:
    """What the routes of ROUTES said: text of 2xx answers, and the headers of all answers together."""

    bodies: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def json(self, route: str) -> dict[str, Any]:
        try:
            found = json.loads(self.bodies.get(route, ""))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


async def ask(client: ProbeClient) -> Answers:
    """Every route of ROUTES at once; what fails is left out."""
    answers = Answers()

    async def one(route: str) -> None:
        try:
            response = await client.request("GET", route, timeout=min(5.0, client.endpoint.timeout))
        except ProbeError:
            return
        answers.headers.update(response.headers)
        if response.is_success:
            answers.bodies[route] = response.text

    await asyncio.gather(*(one(route) for route in ROUTES))
    return answers


async def detect(client: ProbeClient) -> Engine:
    """Ask, then judge. Never raises: a dead endpoint is an unknown engine."""
    return judge(await ask(client))


_METRIC_PREFIXES = {
    "anaphora_": "anaphora",
    "vllm:": "vllm",
    "sglang:": "sglang",
    "llamacpp:": "llama.cpp",
}
_OWNERS = {
    "anaphora": "anaphora",
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama.cpp",
    "library": "ollama",
    "transformers": "transformers",
}
_HOSTED = ("openai-organization", "openai-processing-ms", "anthropic-ratelimit-requests-limit", "x-groq-region",
           "x-ratelimit-limit-requests", "x-request-cost", "x-goog-api-client")  # fmt: skip


def judge(answers: Answers) -> Engine:
    """Collect votes; an engine's own route or metrics (3) outweigh a name in a list of models (2) and a habit (1)."""
    votes: dict[str, int] = {}
    evidence: list[str] = []

    def vote(name: str, weight: int, text: str) -> None:
        votes[name] = votes.get(name, 0) + weight
        evidence.append(text)

    metrics = answers.bodies.get("/metrics", "")
    for prefix, name in _METRIC_PREFIXES.items():
        if f"\n{prefix}" in f"\n{metrics}":
            vote(name, 3, f"/metrics has {prefix}*")
    props = answers.json("/props")
    if "default_generation_settings" in props or "total_slots" in props:
        vote("llama.cpp", 3, "/props has slots")
    if _server(answers).lower() == "llama.cpp":
        vote("llama.cpp", 3, "header Server: llama.cpp")
    for route in ("/server_info", "/get_server_info"):
        if {"mem_fraction_static", "disable_radix_cache"} & set(answers.json(route)):
            vote("sglang", 3, f"{route} has SGLang's settings")
    ollama = answers.json("/api/version").get("version")
    if isinstance(ollama, str):
        vote("ollama", 3, f"/api/version says {ollama}")
    owners = {str(entry.get("owned_by")) for entry in answers.json("/v1/models").get("data") or () if _is_dict(entry)}
    for owner in sorted(owners & set(_OWNERS)):
        vote(_OWNERS[owner], 2, f"/v1/models says owned_by {owner}")
    version = answers.json("/version").get("version")
    hosted = [name for name in _HOSTED if name in answers.headers]
    if hosted:
        vote("hosted", 2, f"header {hosted[0]}")
    elif not votes and isinstance(version, str):
        vote("vllm", 1, "/version answers as vLLM's does")
    gateway = _gateway(answers, metrics)
    best = max(votes, key=lambda name: votes[name], default="unknown")
    weight = votes.get(best, 0)
    sure: Sureness = "certain" if weight >= 3 else "likely" if weight == 2 else "guess" if weight else "unknown"
    if best in ("vllm", "sglang") and isinstance(version, str):
        found: str | None = version
    else:
        found = {"anaphora": version, "ollama": ollama, "llama.cpp": props.get("build_info")}.get(best)
    return Engine(best, str(found) if found else None, sure, gateway, tuple(evidence))


def _gateway(answers: Answers, metrics: str) -> str | None:
    for header, name in GATEWAYS.items():
        if header in answers.headers:
            return name
    if "\nlitellm_" in f"\n{metrics}":
        return "LiteLLM"
    return None


def _server(answers: Answers) -> str:
    return answers.headers.get("server", "")


def _is_dict(value: object) -> bool:
    return isinstance(value, Mapping)
