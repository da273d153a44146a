"""Every wrong request is told what is wrong and what to change, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from anaphora.engine.loop import EngineLoop
from anaphora.server.app import create_app
from anaphora.server.requests import ChatRequest, CompletionRequest
from anaphora.server.settings import ServerSettings, ServerState
from anaphora.server.unsupported import UNSUPPORTED as UNSUPPORTED_FIELDS
from support.servers import Served, running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MAX_BODY_BYTES = 100_000
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 4, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Hello", "max_tokens": 4, **fields}


def message(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": "Hello", **fields}])


def chat_tokens(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, **fields}


BOTH_ENDS = {"continue_final_message": True, "add_generation_prompt": True}
UNKNOWN, UNSUPPORTED, VALUE = "unknown_parameter", "unsupported_parameter", "invalid_value"
CASES: list[tuple[str, Any, int, str | None, str | None, tuple[str, ...]]] = [
    # route, body, status, param, code, words of the message
    (CHAT, [], 400, None, "invalid_body", ("must be a JSON object", "a list of 0")),
    (CHAT, {}, 400, "messages", "missing_required_parameter", ("`messages` is required",)),
    (CHAT, chat(messages=[]), 400, "messages", VALUE, ("at least 1",)),
    (CHAT, chat(messages="hi"), 400, "messages", VALUE, ("a list", 'the string "hi"')),
    (CHAT, chat(messages=["hi"]), 400, "messages[0]", VALUE, ("an object",)),
    (CHAT, message(role="boss"), 400, "messages[0].role", VALUE, ("'assistant'", "boss")),
    (CHAT, message(content=5), 400, "messages[0].content", VALUE, ("a string or a list", "number 5")),
    (CHAT, message(content=None), 400, "messages", None, ("no `content`",)),
    (CHAT, message(content=[{"type": "image_url"}]), 400, "messages", UNSUPPORTED, ("image_url", "text only")),
    (CHAT, message(content=[{"type": "input_audio"}]), 400, "messages", UNSUPPORTED, ("input_audio",)),
    (CHAT, message(content=[{"type": "text"}]), 400, "messages[0].content[0].text", None, ("required",)),
    (CHAT, message(contents="x"), 400, "contents", UNKNOWN, ("Did you mean `content`?",)),
    (CHAT, chat(max_token=5), 400, "max_token", UNKNOWN, ("Did you mean `max_tokens`?",)),
    (CHAT, chat(max_tokens=5, max_completion_tokens=6), 400, "max_completion_tokens", None, ("(5)", "(6)")),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs", None, ("logprobs: true",)),
    (CHAT, chat(logprobs=5), 400, "logprobs", VALUE, ("true or false",)),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools", UNSUPPORTED, ("tool_choice",)),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice", UNSUPPORTED, ("none",)),
    (CHAT, chat(functions=[{}]), 400, "functions", UNSUPPORTED, ("functions",)),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "response_format", UNSUPPORTED, ("in the prompt",)),
    (CHAT, chat(guided_json={}), 400, "guided_json", UNSUPPORTED, ("in the prompt",)),
    (CHAT, chat(modalities=["audio"]), 400, "modalities", UNSUPPORTED, ("text only",)),
    (CHAT, chat(reasoning_effort="low"), 400, "reasoning_effort", UNSUPPORTED, ("chat_template_kwargs",)),
    (CHAT, chat(echo=True), 400, "echo", UNSUPPORTED, (TEXT,)),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options", None, ("stream: true",)),
    (CHAT, chat(stream=True, stream_options={"usage": True}), 400, "usage", UNKNOWN, ("include_usage",)),
    (CHAT, chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs", None, ("messages",)),
    (
        CHAT,
        chat(continue_final_message=True, add_generation_prompt=True),
        400,
        "continue_final_message",
        None,
        ("one",),
    ),
    (CHAT, chat(model="gpt-4"), 404, "model", "model_not_found", ("`gpt-4`", "`tiny`")),
    (CHAT, chat(model=3), 400, "model", VALUE, ("a string",)),
    (CHAT, chat(service_tier="flex"), 400, "service_tier", VALUE, ("'auto' or 'default'",)),
    (TEXT, {"max_tokens": 4}, 400, "prompt", "missing_required_parameter", ("required",)),
    (TEXT, text(prompt=[]), 400, "prompt", None, ("not be empty",)),
    (TEXT, text(prompt=""), 400, "prompt", None, ("no tokens",)),
    (TEXT, text(prompt=None), 400, "prompt", None, ("a string, a list of strings",)),
    (TEXT, text(prompt=["a", 1]), 400, "prompt", None, ("mixed",)),
    (TEXT, text(prompt=[[1, "a"]]), 400, "prompt[0][1]", VALUE, ("a whole number", '"a"')),
    (TEXT, text(prompt=[1, 2.5]), 400, "prompt", None, ("mixed",)),
    (TEXT, text(prompt=[True]), 400, "prompt", None, ("token ids",)),
    (TEXT, text(prompt=[-1]), 400, "prompt[0]", VALUE, ("0 or more",)),
    (TEXT, text(prompt=[9999]), 400, "prompt", None, ("9999", "257")),
    (TEXT, text(prompt=["a"] * 129), 400, "n", None, ("129", "128")),
    (TEXT, text(prompt=["a"] * 65, n=2), 400, "n", None, ("130", "128")),
    (TEXT, text(prompt="a" * 127), 400, "max_tokens", "context_length_exceeded", ("127", "4", "128")),
    (TEXT, text(prompt="a" * 500), 400, "prompt", "context_length_exceeded", ("500", "128")),
    (TEXT, text(max_tokens=1000), 400, "max_tokens", "context_length_exceeded", ("1000", "128", "123")),
    (TEXT, text(max_tokens=0), 400, "max_tokens", VALUE, ("1 or more",)),
    (TEXT, text(max_tokens="5"), 400, "max_tokens", VALUE, ("a whole number", '"5"')),
    (TEXT, text(max_tokens=2.5), 400, "max_tokens", VALUE, ("a whole number",)),
    (TEXT, text(max_tokens=True), 400, "max_tokens", VALUE, ("a whole number", "true")),
    (TEXT, text(min_tokens=5), 400, "min_tokens", None, ("4",)),
    (TEXT, text(temperature=3), 400, "temperature", VALUE, ("2 or less",)),
    (TEXT, text(temperature=-1), 400, "temperature", VALUE, ("0 or more",)),
    (TEXT, text(temperature="hot"), 400, "temperature", VALUE, ("a number",)),
    (TEXT, text(top_p=0), 400, "top_p", VALUE, ("greater than 0",)),
    (TEXT, text(n=0), 400, "n", VALUE, ("1 or more",)),
    (TEXT, text(n=2, best_of=3), 400, "best_of", UNSUPPORTED, ("(3)", "(2)")),
    (TEXT, text(suffix="end"), 400, "suffix", UNSUPPORTED, ("middle",)),
    (TEXT, text(echo=True, logprobs=1), 400, "echo", UNSUPPORTED, ("logprobs",)),
    (TEXT, text(logprobs=50), 400, "logprobs", VALUE, ("20 or less",)),
    (TEXT, text(stop=7), 400, "stop", VALUE, ("a string or a list",)),
    (TEXT, text(stop=["a", 7]), 400, "stop[1]", VALUE, ("a string", "number 7")),
    (TEXT, text(stop=""), 400, "stop", VALUE, ("at least 1",)),
    (TEXT, text(stop=["a"] * 17), 400, "stop", VALUE, ("at most 16",)),
    (TEXT, text(stop_token_ids=[300]), 400, "stop_token_ids", None, ("300", "256")),
    (TEXT, text(stop_token_ids=list(range(256)), min_tokens=1), 400, "stop_token_ids", None, ("every token",)),
    (TEXT, text(logit_bias={"x": 1}), 400, "logit_bias", None, ("token ids",)),
    (TEXT, text(logit_bias={"999": 1}), 400, "logit_bias", None, ("999", "256")),
    (TEXT, text(logit_bias={"1": 200}), 400, "logit_bias.1", VALUE, ("100 or less",)),
    (TEXT, text(seed=2**63), 400, "seed", VALUE, ("9223372036854775807 or less",)),
    (TEXT, text(cache_salt=""), 400, "cache_salt", VALUE, ("at least 1",)),
    (TEXT, text(use_beam_search=True), 400, "use_beam_search", UNSUPPORTED, ("`n`",)),
    (TEXT, text(prompt_logprobs=1), 400, "prompt_logprobs", UNSUPPORTED, ("logprobs",)),
    (TEXT, text(tools=[{}]), 400, "tools", UNSUPPORTED, ("tool",)),
    (TEXT, text(prompt="\ud800"), 400, "prompt", VALUE, ("surrogate",)),
    (TEXT, text(cache_salt="\ud800"), 400, "cache_salt", VALUE, ("surrogate",)),
    (TEXT, text(stop=["\ud800"]), 400, "stop[0]", VALUE, ("surrogate",)),
    (CHAT, message(content="\ud800"), 400, "messages[0].content", VALUE, ("surrogate",)),
    (TEXT, text(**{"\ud800": 1}), 400, "?", UNKNOWN, ("no field",)),
    (TEXT, text(user="\ud800"), 400, "user", VALUE, ("valid Unicode",)),
    ("/tokenize", {}, 400, "prompt", None, ("either",)),
    ("/tokenize", {"prompt": "a", "messages": HELLO}, 400, "prompt", None, ("either",)),
    (
        "/tokenize",
        {"messages": HELLO, "add_special_tokens": True},
        400,
        "add_special_tokens",
        UNSUPPORTED,
        ("template",),
    ),
    ("/detokenize", {"tokens": [257]}, 400, "tokens", None, ("257", "256")),
    ("/detokenize", {"tokens": "ab"}, 400, "tokens", VALUE, ("a list",)),
    ("/v1/chat/completion", {}, 404, None, "route_not_found", (CHAT,)),
    ("/chat/completions", {}, 404, None, "route_not_found", (CHAT,)),
    ("/nowhere", {}, 404, None, "route_not_found", ("/health", TEXT)),
    ("/v1/models", {}, 405, None, "method_not_allowed", ("GET",)),
]


def check(reply: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer that has the one shape, and shows nothing of our insides."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    lowered = reply.text.lower()
    assert not any(word in lowered for word in ("traceback", "pydantic", "something else", "input should"))
    error: dict[str, Any] = body["error"]
    return error


@pytest.fixture(scope="module")
def served(tiny_loop: Callable[[], EngineLoop]) -> Iterator[Served]:
    with running(ServerState(ServerSettings(("tiny",), max_body_bytes=MAX_BODY_BYTES), tiny_loop())) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


def post(client: httpx.Client, route: str, body: bytes, **headers: str) -> httpx.Response:
    return client.post(route, content=body, headers={"Content-Type": "application/json", **headers})


@pytest.mark.parametrize(("route", "body", "status", "param", "code", "words"), CASES)
def test_refused(
    client: httpx.Client,
    route: str,
    body: Any,
    status: int,
    param: str | None,
    code: str | None,
    words: tuple[str, ...],
) -> None:
    error = check(post(client, route, json.dumps(body).encode()), status)
    assert error["param"] == param
    assert error["code"] == code or code is None
    assert all(word in error["message"] for word in words), error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_FIELDS))
def test_every_unsupported_field_is_named_unless_it_asks_for_nothing(client: httpx.Client, name: str) -> None:
    refusal = UNSUPPORTED_FIELDS[name]
    route, make = (TEXT, text) if name not in CompletionRequest.model_fields else (CHAT, chat)
    error = check(post(client, route, json.dumps(make(**{name: ["!"]})).encode()), 400)
    assert (error["param"], error["code"]) == (name, UNSUPPORTED)
    assert refusal.advice in error["message"] or name in ChatRequest.model_fields
    for neutral in (None, *refusal.neutral):
        assert post(client, route, json.dumps(make(**{name: neutral})).encode()).status_code == 200, neutral


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "got nothing"),
        (b"{", "line 1, column 2"),
        (b'{"prompt": "a",\n "n": }', "line 2, column 7 (character 22)"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": ' + b"[" * 50_000, "nested too deeply"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "too many digits"),
        (b'{"prompt": "a", "temperature": NaN}', "a finite number"),
        (b'{"prompt": "a", "temperature": 1e999}', "a finite number"),
        (b'{"prompt": "a", "n": ' + b"1" * 100 + b"}", "a very long number"),
        (b'"text"', "must be a JSON object"),
        (b"null", "got null"),
    ],
)
def test_bad_json(client: httpx.Client, body: bytes, words: str) -> None:
    assert words in check(post(client, TEXT, body), 400)["message"]


def test_a_body_that_is_not_declared_as_json(client: httpx.Client) -> None:
    for headers in ({"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}, {}):
        reply = client.post(TEXT, content=b'{"prompt": "a"}', headers=headers)
        assert "Content-Type: application/json" in check(reply, 415)["message"]


def test_a_body_that_is_too_large_whether_or_not_its_length_is_declared(client: httpx.Client) -> None:
    body = json.dumps(text(prompt="a" * MAX_BODY_BYTES)).encode()
    chunks = (body[at : at + 1000] for at in range(0, len(body), 1000))
    for content in (body, body * 20, chunks):
        reply = client.post(TEXT, content=content, headers={"Content-Type": "application/json"})
        assert str(MAX_BODY_BYTES) in check(reply, 413)["message"]
    assert post(client, TEXT, body, Expect="100-continue").status_code == 413
    assert post(client, TEXT, json.dumps(text()).encode()).status_code == 200


def test_long_names_do_not_come_back_at_full_length(client: httpx.Client) -> None:
    for body in (text(model="m" * 50_000), text(**{"f" * 50_000: 1})):
        reply = client.post(TEXT, json=body)
        assert len(reply.text) < 6000
        assert reply.json()["error"]["message"].endswith("…")


def test_wrong_methods_say_which_is_right(client: httpx.Client) -> None:
    reply = client.get(CHAT)
    assert "POST" in check(reply, 405)["message"]
    assert reply.headers["allow"] == "POST"


def test_the_openai_client_raises_its_own_errors(served: Served) -> None:
    client = served.openai()
    with pytest.raises(openai.NotFoundError, match="Use one of: `tiny`"):
        client.completions.create(model="nope", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a" * 500)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")
    with pytest.raises(openai.APIStatusError) as too_large:
        client.completions.create(model="tiny", prompt="a" * (2 * MAX_BODY_BYTES))
    assert too_large.value.status_code == 413


def test_a_request_that_can_never_fit_the_pool(serve_tiny: Callable[..., Served]) -> None:
    served = serve_tiny(max_model_len=None, num_blocks=8)
    with served.client() as client:
        longest = client.get("/v1/models").json()["data"][0]["max_model_len"]
        assert longest <= 8 * 16
        check(client.post(TEXT, json=text(prompt="a" * 100, max_tokens=100)), 400)


def test_an_unexpected_error_shows_an_id_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(ServerState(ServerSettings(("tiny",))))

    @app.get("/broken")
    async def broken() -> None:
        raise ZeroDivisionError("a secret")

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get("/broken")

    reply = asyncio.run(ask())
    error = check(reply, 500)
    assert "secret" not in reply.text
    [number] = re.findall(r"Internal error ([0-9a-f]{8})", error["message"])
    assert number in caplog.text
    assert "ZeroDivisionError: a secret" in caplog.text
