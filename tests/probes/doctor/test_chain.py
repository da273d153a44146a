"""Every misbehaving server is diagnosed rightly, and healthy ones get no finding."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount

from anaphora.probes.doctor.chain import CHECKS, examine
from anaphora.probes.doctor.finding import Diagnosis
from anaphora.probes.doctor.report import Report
from anaphora.probes.doctor.visit import Visit
from support import broken_servers as broken
from support.fake_server import Fake, make_app, serving

KEY = "sk-Zx81secretsecret9Q"
QUICK: dict[str, Any] = {"context_words": 0}
COMPLETION = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "fake",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "length"}],
}
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}


def diagnose(url: str, *, environ: Mapping[str, str] | None = None, **given: Any) -> Diagnosis:
    diagnosis = Diagnosis()
    visit = Visit(url, environ=environ or {}, **given)
    asyncio.run(examine(visit, diagnosis, lambda *_: None))
    text = Report(diagnosis, visit).as_text()
    assert KEY not in text
    return diagnosis


def codes(diagnosis: Diagnosis) -> list[str]:
    return [finding.code for finding in diagnosis.findings]


def step(diagnosis: Diagnosis, name: str) -> str:
    return next(s.evidence for s in diagnosis.steps if s.name == name)


def test_a_healthy_server_gets_no_finding_and_every_check_runs() -> None:
    with serving() as url:
        found = diagnose(url)
    assert codes(found) == []
    assert [s.name for s in found.steps] == [check.name for check in CHECKS]
    assert found.exit_code == 0
    assert "vLLM 0.33.0 (certain)" in step(found, "http")
    assert "up to 6,4" in step(found, "context")


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/v1", "{}/v1/"])
def test_every_usual_form_of_the_url_is_healthy(form: str) -> None:
    with serving() as url:
        assert codes(diagnose(form.format(url), **QUICK)) == []


@pytest.mark.parametrize("path", ["/v1/v1", "//v1", "/v1/chat/completions"])
def test_a_url_that_clients_would_stumble_over_is_corrected(path: str) -> None:
    with serving() as url:
        found = diagnose(url + path, **QUICK)
        assert codes(found) == ["url.path"]
        assert f"{url}/v1" in found.findings[0].fix


@pytest.mark.parametrize("granularity", [1, 16, 128, 784])
def test_no_granularity_of_the_cache_is_a_finding(granularity: int) -> None:
    with serving(Fake(granularity=granularity)) as url:
        assert codes(diagnose(url, **QUICK)) == []


# -- keys -------------------------------------------------------------------------------------------------------------


def token_that_ended() -> str:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    return f"{part({'alg': 'HS256'})}.{part({'exp': time.time() - 3600})}.c2lnbmF0dXJl"


def takes(header: str, value: str, *, said: str = "Incorrect API key provided") -> Starlette:
    """The fake server behind a gate that only reads one header, and refuses requests with two credentials."""
    inner = make_app(Fake())

    async def gate(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope)
        both = {"authorization", "x-api-key"} <= set(request.headers.keys())
        if both or request.headers.get(header) != value:
            await JSONResponse({"error": {"message": said}}, 401)(scope, receive, send)
        else:
            await inner(scope, receive, send)

    return Starlette(routes=[Mount("/", gate)])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "auth.no-key"),
        ({"api_key": "sk-another-key-of-mine"}, "auth.wrong-key"),
        ({"api_key": f'"{KEY}"'}, "auth.key-text"),
        ({"api_key": f" {KEY}\n"}, "auth.key-text"),
        ({"api_key": f"Bearer {KEY}"}, "auth.key-text"),
        ({"api_key": "$OPENAI_API_KEY"}, "auth.key-text"),
        ({"api_key": "your-api-key"}, "auth.key-text"),
        ({"api_key": token_that_ended()}, "auth.expired"),
        ({"headers": (f"Authorization: {KEY}",)}, "auth.no-bearer"),
        ({"headers": (f"x-api-key: {KEY}",)}, "auth.scheme"),
        ({"api_key": KEY, "headers": ("x-api-key: sk-stale-stale-stale",)}, "auth.both"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-",
)
def test_401_in_each_of_its_causes(given: dict[str, Any], expected: str) -> None:
    with serving(app=takes("authorization", f"Bearer {KEY}")) as url:
        found = diagnose(url, **given, **QUICK)
    assert codes(found) == [expected]
    assert found.findings[0].side == "you"
    assert found.exit_code == 1


def test_the_right_key_in_the_wrong_header() -> None:
    with serving(app=takes("x-api-key", KEY)) as url:
        found = diagnose(url, api_key=KEY, **QUICK)
    assert codes(found) == ["auth.scheme"]
    assert "x-api-key" in found.findings[0].fix


def test_the_server_says_that_the_token_has_expired() -> None:
    with serving(app=takes("authorization", "Bearer other", said="The access token expired")) as url:
        assert codes(diagnose(url, api_key=KEY, **QUICK)) == ["auth.expired"]


def test_a_key_wanted_only_for_completions() -> None:
    with serving(Fake(api_key=KEY)) as url:
        assert codes(diagnose(url, **QUICK)) == ["auth.no-key"]
        assert codes(diagnose(url, api_key=KEY, **QUICK)) == []
        assert codes(diagnose(url, api_key="sk-another-key-of-mine", **QUICK)) == ["auth.wrong-key"]


# -- what is no API ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handler", "expected", "exit_code"),
    [
        (broken.page(broken.WEB_PAGE), "path.html", 1),
        (broken.page(broken.WEB_PAGE, 404), "path.html", 1),
        (broken.page(broken.GATEWAY_PAGE, 502), "http.gateway", 3),
        (broken.page(broken.WEB_PAGE, 403), "http.forbidden", 1),
        (broken.page(broken.LOGIN_PAGE), "http.login", 1),
        (broken.redirect("/login?next=/v1/models"), "http.login", 1),
        (broken.redirect("http://elsewhere.example/v1/models"), "http.redirect", 1),
        (broken.answer(404, {"detail": "Not Found"}), "path.missing", 1),
        (broken.answer(200, ""), "path.empty", 1),
        (broken.answer(200, {"status": "ok"}), "path.not-api", 1),
        (broken.answer(503, {"error": {"message": "Loading model"}}), "http.unavailable", 3),
        (broken.answer(500, {"error": {"message": "boom"}}), "http.error", 1),
        (broken.answer(429, {"error": {"message": "slow down"}}), "http.limit", 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "-",
)
def test_something_else_answers(handler: broken.Handler, expected: str, exit_code: int) -> None:
    with serving(app=broken.replaced(everything=handler)) as url:
        found = diagnose(url, **QUICK)
    assert codes(found) == [expected]
    assert found.exit_code == exit_code


def test_the_api_under_another_path_is_found() -> None:
    app = Starlette(routes=[Mount("/api", make_app(Fake()))])
    with serving(app=app) as url:
        found = diagnose(url, **QUICK)
    assert codes(found) == ["path.base"]
    assert found.findings[0].fix == f"Use the base URL {url}/api/v1"


def test_no_list_of_models_is_no_fault_when_the_model_is_given() -> None:
    with serving(app=broken.replaced(models=broken.answer(404, {"detail": "Not Found"}))) as url:
        assert codes(diagnose(url, model="fake", **QUICK)) == []
        assert codes(diagnose(url, **QUICK)) == ["model.none"]


# -- below HTTP -------------------------------------------------------------------------------------------------------


def test_a_server_that_hangs() -> None:
    with broken.raw(broken.silent) as address:
        found = diagnose(f"http://{address}", timeout=0.4, **QUICK)
    assert codes(found) == ["http.hangs"]
    assert found.exit_code == 3
    assert [s.name for s in found.steps][-1] == "http"


def test_something_that_does_not_speak_http() -> None:
    with broken.raw(broken.says(b"220 mail.example ESMTP\r\n")) as address:
        found = diagnose(f"http://{address}", **QUICK)
    assert codes(found) == ["http.broken"]
    assert found.exit_code == 3


def test_nothing_listens() -> None:
    with broken.raw(broken.silent) as address:
        pass
    found = diagnose(f"http://{address}", **QUICK)
    assert codes(found)[0] in ("tcp.refused", "tcp.other-port")
    assert found.exit_code == 3


def test_a_name_without_an_address() -> None:
    found = diagnose("http://no-such-host.invalid:8000", **QUICK)
    assert codes(found) == ["dns.unknown"]
    assert found.exit_code == 3


def test_a_certificate_nobody_signed(tmp_path: Path) -> None:
    context = broken.self_signed(tmp_path)
    with broken.raw(broken.says(broken.http("200 OK", "{}", "application/json")), context) as address:
        found = diagnose(f"https://{address}", **QUICK)
        assert codes(found) == ["tls.untrusted"]
        assert "SSL_CERT_FILE" in found.findings[0].fix
        assert codes(diagnose(f"http://{address}", **QUICK)) == ["http.https"]


def test_https_where_only_http_is_spoken() -> None:
    with serving() as url:
        found = diagnose(url.replace("http:", "https:"), **QUICK)
        assert codes(found) == ["tls.plain"]
        assert f"Use {url}/v1" == found.findings[0].fix


# -- proxies ----------------------------------------------------------------------------------------------------------


def test_a_dead_proxy() -> None:
    with broken.raw(broken.silent) as address:
        pass
    found = diagnose("http://llm.example.com:8000", environ={"HTTP_PROXY": f"http://{address}"}, **QUICK)
    assert codes(found) == ["proxy.dead"]
    assert "unset HTTP_PROXY" in found.findings[0].fix
    assert found.exit_code == 3


@pytest.mark.parametrize(
    ("status", "expected"), [("502 Bad Gateway", "http.gateway"), ("407 Proxy Authentication Required", "proxy.auth")]
)
def test_a_proxy_that_answers_in_the_servers_place(status: str, expected: str) -> None:
    with broken.raw(broken.says(broken.http(status, broken.GATEWAY_PAGE))) as address:
        found = diagnose("http://llm.example.com:8000", environ={"http_proxy": f"http://{address}"}, **QUICK)
    assert codes(found) == [expected]


def test_a_proxy_for_a_local_address_is_bypassed_and_told() -> None:
    with serving() as url:
        found = diagnose(url, environ={"HTTP_PROXY": "http://user:hunter2222@10.0.0.9:3128"}, **QUICK)
    assert codes(found) == ["proxy.local"]
    assert "NO_PROXY=127.0.0.1" in found.findings[0].fix
    with serving() as url:
        environ = {"HTTP_PROXY": "http://10.0.0.9:3128", "NO_PROXY": "127.0.0.1", "no_proxy": "localhost,127.0.0.1"}
        assert codes(diagnose(url, environ=environ, **QUICK)) == ["proxy.case"]


# -- models and completions -------------------------------------------------------------------------------------------


def test_a_wrong_model_gets_the_nearest_name() -> None:
    with serving(Fake(models=("qwen2.5-7b-instruct", "llama"))) as url:
        found = diagnose(url, model="Qwen/Qwen2.5-7B-Instruct", **QUICK)
    assert codes(found) == ["model.unknown"]
    assert found.findings[0].fix.startswith("--model qwen2.5-7b-instruct")


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (broken.answer(200, {"response": "hi", "done": True}), "completion.no-choices"),
        (broken.answer(200, {"choices": []}), "completion.no-choices"),
        (broken.answer(200, {"choices": None}), "completion.no-choices"),
        (broken.answer(200, '{"choices": [{"mess'), "completion.not-json"),
        (broken.answer(200, ""), "completion.empty"),
        (broken.page(broken.WEB_PAGE), "completion.html"),
        (broken.page(broken.GATEWAY_PAGE, 502), "completion.gateway"),
        (broken.answer(200, {"error": {"message": "no credit"}}), "completion.hidden-error"),
        (broken.answer(500, {"error": {"message": "CUDA out of memory"}}), "completion.error"),
        (broken.answer(404, {"error": {"message": "The model `x` does not exist"}}), "model.unknown"),
        (broken.answer(405, {"detail": "Method Not Allowed"}), "completion.no-route"),
        (broken.answer(400, {"message": "no chat template is defined"}), "completion.no-template"),
        (broken.answer(422, {"detail": "temperature: unsupported"}), "completion.refused"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-",
)
def test_broken_completions(handler: broken.Handler, expected: str) -> None:
    with serving(app=broken.replaced(chat=handler)) as url:
        assert codes(diagnose(url, **QUICK)) == [expected]


def test_a_completion_that_lacks_what_typed_clients_want() -> None:
    message = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}}]}

    async def handler(request: Request) -> Response:
        if (await request.json()).get("stream"):
            return StreamingResponse(broken.without_done(), media_type="text/event-stream")
        return JSONResponse({**message, "usage": USAGE})

    with serving(app=broken.replaced(chat=handler)) as url:
        found = codes(diagnose(url, **QUICK))
    assert found[:2] == ["completion.shape", "stream.no-done"]


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
