"""The checks of a URL in order; what depends on a failed one is skipped."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from anaphora.errors import ProbeError
from anaphora.probes.doctor import caching, connection, context, model, pages, streaming
from anaphora.probes.doctor.auth import check_auth
from anaphora.probes.doctor.finding import Diagnosis, Status, Step
from anaphora.probes.doctor.visit import Outcome, Visit

Run = Callable[[Visit], Awaitable[Outcome]]
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True)
class Check:
    """One link of the chain."""

    name: str
    title: str
    run: Run
    needs: tuple[str, ...] = ()


_ROUTES = (
    ("/v1/chat/completions", "OpenAI clients"),
    ("/v1/messages", "Claude Code"),
    ("/v1/responses", "Codex"),
)


async def check_routes(visit: Visit) -> Outcome:
    """Which clients can talk to it: an empty body is refused where the route is, 404 where it is not."""
    found = []
    for path, client in _ROUTES:
        try:
            answer = await visit.send("POST", visit.http.url(path), body={})
        except ProbeError as error:
            found.append(f"{path}: {error.kind}")
            continue
        there = answer.status_code not in (404, 405, 501)
        found.append(f"{path} ({client}): {'yes' if there else 'no'}")
    return Outcome("; ".join(found))


CHECKS = (
    Check("url", "URL", connection.check_url),
    Check("proxy", "Proxy variables", connection.check_proxy, ("url",)),
    Check("dns", "DNS", connection.check_dns, ("url",)),
    Check("tcp", "TCP", connection.check_tcp, ("dns",)),
    Check("tls", "TLS", connection.check_tls, ("tcp",)),
    Check("http", "HTTP", pages.check_http, ("tls",)),
    Check("path", "Path", pages.check_path, ("http",)),
    Check("auth", "Key", check_auth, ("path",)),
    Check("model", "Model", model.check_model, ("auth",)),
    Check("completion", "One-token completion", model.check_completion, ("model",)),
    Check("stream", "Streaming", streaming.check_streaming, ("completion",)),
    Check("context", "Context length", context.check_context, ("completion",)),
    Check("usage", "Usage", caching.check_usage, ("completion",)),
    Check("cache", "Prefix cache", caching.check_cache, ("stream", "context")),
    Check("routes", "Routes", check_routes, ("auth",)),
)


async def examine(visit: Visit, diagnosis: Diagnosis, progress: Progress) -> None:
    """Run the chain. State changes: `diagnosis` step by step, so that an interrupted run keeps what it has."""
    broken: set[str] = set()
    try:
        for done, check in enumerate(CHECKS):
            missing = [need for need in check.needs if need in broken]
            if missing:
                broken.add(check.name)
                continue
            progress(check.title, done, len(CHECKS))
            began = time.perf_counter()
            outcome = await check.run(visit)
            if outcome.stop:
                broken.add(check.name)
            status: Status = "failed" if outcome.stop else "finding" if outcome.findings else "ok"
            diagnosis.steps.append(
                Step(check.name, check.title, status, outcome.evidence, outcome.findings, outcome.unreachable,
                     time.perf_counter() - began)
            )  # fmt: skip
    finally:
        if visit.client is not None:
            await visit.client.http.aclose()
