"""Every misbehaving server is diagnosed rightly, and healthy ones get no finding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount

from anaphora.probes.doctor.chain import CHECKS
from support import broken_servers as broken
from support.diagnoses import KEY, QUICK, USAGE, codes, diagnose, step, token_that_ended
from support.fake_server import Fake, make_app, serving


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
