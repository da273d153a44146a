"""Misbehaviour in the answers themselves: streams, what is left of a long prompt, counts and the cache."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from support import broken_servers as broken
from support.diagnoses import COMPLETION, QUICK, USAGE, codes, diagnose, step
from support.fake_server import Fake, make_app, serving

# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "expected"),
    [(broken.cut_short, "stream.cut"), (broken.without_done, "stream.no-done"), (broken.not_json, "stream.not-json")],
)
def test_broken_streams(stream: Any, expected: str) -> None:
    with serving(app=broken.replaced(chat=broken.only_streams(stream))) as url:
        assert codes(diagnose(url, **QUICK))[0] == expected


def test_a_connection_that_breaks_in_the_middle_of_a_stream() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    part = broken.chunk("word ")

    def handle(connection: Any) -> None:
        asked = b""
        while b"\r\n\r\n" not in asked or (b"POST" in asked[:4] and not asked.rstrip().endswith(b"}")):
            if not (data := connection.recv(65536)):
                return
            asked += data
        if b"/v1/models" in asked.split(b"\r\n")[0]:
            connection.sendall(broken.http("200 OK", '{"data": [{"id": "fake"}]}', "application/json"))
        elif b'"stream"' in asked:
            connection.sendall(head + f"{len(part):x}\r\n".encode() + part + b"\r\n" + b"ff\r\ndata: {")
        elif b"/chat/completions" in asked.split(b"\r\n")[0]:
            connection.sendall(broken.http("200 OK", json.dumps({**COMPLETION, "usage": USAGE}), "application/json"))
        else:
            connection.sendall(broken.http("404 Not Found", "{}", "application/json"))

    with broken.raw(handle) as address:
        assert codes(diagnose(f"http://{address}", **QUICK))[0] == "stream.cut"


def test_a_buffered_stream() -> None:
    with serving(Fake(buffered=True, decode_seconds=0.03)) as url:
        found = diagnose(url, **QUICK)
    assert codes(found) == ["stream.buffered"]
    assert found.findings[0].side == "between"


def test_a_stream_that_is_ignored() -> None:
    with serving(app=broken.replaced(chat=broken.answer(200, COMPLETION))) as url:
        assert codes(diagnose(url, **QUICK)) == ["stream.ignored", "usage.missing"]


def test_a_compressed_stream() -> None:
    with serving(app=broken.compressed(make_app(Fake()))) as url:
        assert codes(diagnose(url, **QUICK)) == ["stream.compressed"]


def test_a_slow_first_token() -> None:
    with serving(Fake(overhead=0.25)) as url:
        assert codes(diagnose(url, slow_seconds=0.2, **QUICK)) == ["stream.slow-start"]


def test_a_completion_that_never_comes() -> None:
    async def never(_: Request) -> Response:
        await asyncio.sleep(2)
        return Response("")

    with serving(app=broken.replaced(chat=never)) as url:
        found = diagnose(url, timeout=0.3, **QUICK)
    assert codes(found) == ["completion.unreachable"]
    assert found.exit_code == 3


# -- context, counts, cache -------------------------------------------------------------------------------------------


def test_silent_truncation() -> None:
    with serving(Fake(max_prompt=2048)) as url:
        found = diagnose(url)
    assert codes(found) == ["context.truncated"]
    assert "2,048" in found.findings[0].what


def test_silent_truncation_by_ollama() -> None:
    fake = Fake(max_prompt=4096, counters="missing")
    models = broken.answer(200, {"data": [{"id": "fake", "owned_by": "library"}]})
    with serving(
        app=broken.replaced(fake, models=models, api_version=broken.answer(200, {"version": "0.20.1"}))
    ) as url:
        found = diagnose(url)
    assert codes(found) == ["context.truncated-ollama"]
    assert "num_ctx" in found.findings[0].fix


def test_a_prompt_refused_with_its_limit_is_no_finding() -> None:
    said = "This model's maximum context length is 1000 tokens. However, your prompt contains 1623 input tokens"
    fake = Fake()
    inner = broken.replaced(fake)

    async def limited(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        first = iter([message])

        async def again() -> Any:
            return next(first, None) or await receive()

        if len(message.get("body", b"").split()) > 1000:
            await JSONResponse({"error": {"message": said, "code": "context_length_exceeded"}}, 400)(scope, again, send)
        else:
            await inner(scope, again, send)

    with serving(app=limited) as url:
        found = diagnose(url)
    assert codes(found) == []
    assert "limit 1,000 tokens" in step(found, "context")


@pytest.mark.parametrize(
    ("fake", "expected"),
    [
        (Fake(usage=False), ["usage.missing"]),
        (Fake(cached_tokens="missing"), ["usage.cached"]),
        (Fake(cached_tokens="everything"), ["cache.lies"]),
        (Fake(cached_tokens="zero", seconds_per_token=2e-4), ["cache.unreported"]),
        (Fake(counters="zero"), ["cache.counter"]),
        (Fake(granularity=None), ["cache.none"]),
        (Fake(replicas=2, routing="round_robin"), ["cache.affinity"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "-",
)
def test_counts_and_the_cache(fake: Fake, expected: list[str]) -> None:
    with serving(fake) as url:
        assert codes(diagnose(url, **QUICK)) == expected


def test_vllm_and_sglang_get_their_own_flag() -> None:
    with serving(Fake(cached_tokens="missing")) as url:
        assert "--enable-prompt-tokens-details" in diagnose(url, **QUICK).findings[0].fix
