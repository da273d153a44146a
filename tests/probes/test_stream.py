"""Streams over real sockets: times, usage, and every way in which they go wrong."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from anaphora.errors import (
    ConfigError,
    EndpointRefused,
    EndpointTimeout,
    EndpointUnreachable,
    ProbeError,
    StreamCut,
    UnexpectedAnswer,
)
from anaphora.probes.client import ProbeClient
from anaphora.probes.endpoint import Endpoint
from anaphora.probes.stream import StreamResult
from support.fake_server import Fake, serving

MESSAGES = [{"role": "user", "content": "one two three"}]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


@contextmanager
def raw_server(pieces: Sequence[bytes], *, hold: bool = False) -> Iterator[str]:
    """Reads one request, sends the pieces one by one, closes (or holds the connection open)."""
    listener = socket.create_server(("127.0.0.1", 0))
    release = threading.Event()

    def run() -> None:
        connection, _ = listener.accept()
        with connection:
            received = b""
            # all of it: closing with unread bytes would reset the connection
            while not received.endswith(b"}") and (data := connection.recv(65536)):
                received += data
            for piece in pieces:
                connection.sendall(piece)
                release.wait(0.002)
            if hold:
                release.wait(20)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        release.set()
        thread.join(20)
        listener.close()


def stream(url: str, max_tokens: int = 8, timeout: float = 10.0, **extra: object) -> StreamResult:
    async def main() -> StreamResult:
        async with ProbeClient(Endpoint.parse(url, timeout=timeout, environ={})) as client:
            return await client.stream_chat("fake", MESSAGES, max_tokens, extra)

    return asyncio.run(main())


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\r\n\r\n"


def content(text: str, **more: object) -> bytes:
    return event(choices=[{"delta": {"content": text}, **more}])


def test_a_stream_is_timed_and_counted() -> None:
    with serving(Fake(granularity=1, template=2)) as url:
        first, second = stream(url), stream(url)
    assert (first.prompt_tokens, first.completion_tokens, first.cached_tokens) == (6, 8, 0)
    assert second.cached_tokens == 5
    assert first.text == "word " * 8
    assert first.finish_reason == "length"
    assert first.done
    assert first.incremental
    assert len(first.chunk_times) == 8
    assert first.headers_at <= first.ttft <= first.e2e <= first.end_at
    assert first.ttft == first.chunk_times[0]
    assert sum(first.itls) == pytest.approx(first.e2e - first.ttft)
    assert first.tpot == pytest.approx((first.e2e - first.ttft) / 7)


def test_events_are_put_together_whatever_the_packets() -> None:
    whole = (
        b": hello\r\n\r\n" + content("caf\u00e9 ") + content("\u4f60\u597d", finish_reason="stop") + b"data: [DONE]\n\n"
    )
    whole = whole.replace(b"\\u00e9", "\u00e9".encode())
    for size in (1, 7, len(whole)):
        with raw_server([HEAD, *(whole[i : i + size] for i in range(0, len(whole), size))]) as url:
            result = stream(url)
        assert result.text == "caf\u00e9 \u4f60\u597d"
        assert result.done


def test_reasoning_counts_as_content_and_the_answer_is_marked() -> None:
    thought = event(choices=[{"delta": {"reasoning_content": "hm"}}])
    with raw_server([HEAD, thought, content("yes", finish_reason="stop"), b"data: [DONE]\n\n"]) as url:
        result = stream(url)
    assert (result.reasoning, result.text) == ("hm", "yes")
    assert result.answer_at == result.chunk_times[1]


def test_usage_under_other_names() -> None:
    last = event(choices=[], usage={"prompt_tokens": 9, "prompt_cache_hit_tokens": 4})
    own = event(choices=[{"delta": {}, "finish_reason": "stop"}], timings={"cache_n": 7})
    for piece, cached in ((last, 4), (own, 7)):
        with raw_server([HEAD, content("x", finish_reason="stop"), piece]) as url:
            assert stream(url).cached_tokens == cached


def test_a_buffered_stream_is_seen() -> None:
    with serving(Fake(buffered=True)) as url:
        result = stream(url)
    assert result.reads == 1
    assert len(result.chunk_times) == 8


def test_one_json_answer_instead_of_a_stream() -> None:
    body = json.dumps({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}).encode()
    with raw_server([b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n", body]) as url:
        result = stream(url)
    assert not result.incremental
    assert result.text == "hi"


def answer(status: str, body: bytes, kind: str = "text/html", more: bytes = b"") -> list[bytes]:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n".encode()
    return [head + more + b"\r\n" + body]


JSON = "application/json"
BAD: list[tuple[list[bytes], type[ProbeError], str, str]] = [
    (answer("200 OK", b"<!DOCTYPE html><html>login</html>"), UnexpectedAnswer, "html", "HTML"),
    (answer("200 OK", b"", JSON), UnexpectedAnswer, "empty", "nothing"),
    (answer("200 OK", b"{oops", JSON), UnexpectedAnswer, "not_json", "begins"),
    (answer("200 OK", b'{"object": "x"}', JSON), UnexpectedAnswer, "no_choices", "choices"),
    (answer("200 OK", b'["x"]', JSON), UnexpectedAnswer, "no_choices", "choices"),
    (answer("302 Found", b"", more=b"Location: /login?token=S3CRET\r\n"), UnexpectedAnswer, "redirect", "/login"),
    (answer("401 Unauthorized", b'{"error":{"message":"no key"}}', JSON), EndpointRefused, "http_401", "--api-key"),
    (answer("404 Not Found", b"<html>nginx</html>"), EndpointRefused, "http_404", "an HTML page"),
    (answer("502 Bad Gateway", b"<html>nginx</html>"), EndpointRefused, "http_502", "proxy"),
    (answer("418 Teapot", b"short"), EndpointRefused, "http_418", "short"),
    ([HEAD, content("a")], StreamCut, "stream_cut", "1 content chunks"),
    (
        [HEAD.replace(b"Connection", b"Content-Length: 999\r\nConnection"), content("a")],
        StreamCut,
        "stream_cut",
        "broke",
    ),
    ([HEAD, b"data: {nope\n\n"], UnexpectedAnswer, "not_json", "event"),
    ([HEAD, event(error={"message": "CUDA out of memory"})], EndpointRefused, "stream_error", "CUDA"),
    ([HEAD, b"<html>"], UnexpectedAnswer, "html", "HTML"),
    ([b"SSH-2.0-OpenSSH_9\r\n"], EndpointUnreachable, "protocol", "HTTP"),
]


@pytest.mark.parametrize(
    ("pieces", "error", "kind", "words"), BAD, ids=[f"{k}-{i}" for i, (_, _, k, _) in enumerate(BAD)]
)
def test_failures_are_told_apart(pieces: list[bytes], error: type[ProbeError], kind: str, words: str) -> None:
    with raw_server(pieces) as url, pytest.raises(error, match=words) as caught:
        stream(url)
    assert caught.value.kind == kind
    assert caught.value.exit_code == 3
    assert "S3CRET" not in str(caught.value)


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(EndpointUnreachable, match="Nothing listens") as caught:
        stream(f"http://127.0.0.1:{port}")
    assert caught.value.kind == "refused"


def test_a_name_without_address() -> None:
    with pytest.raises(EndpointUnreachable) as caught:
        stream("http://no-such-host.invalid:8000")
    assert caught.value.kind == "dns"


def test_https_to_a_plain_server() -> None:
    with serving() as url, pytest.raises(EndpointUnreachable, match="http://") as caught:
        stream(url.replace("http:", "https:"))
    assert caught.value.kind == "tls"


def test_a_server_that_hangs() -> None:
    with raw_server([], hold=True) as url, pytest.raises(EndpointTimeout, match="--timeout") as caught:
        stream(url, timeout=0.2)
    assert caught.value.kind == "read_timeout"


def test_a_dead_proxy_is_named_without_its_password() -> None:
    environ = {"HTTP_PROXY": "http://me:S3CRET@127.0.0.1:9"}

    async def main() -> None:
        async with ProbeClient(Endpoint.parse("http://api.example.com", environ=environ)) as client:
            await client.models()

    with pytest.raises(EndpointUnreachable, match="HTTP_PROXY") as caught:
        asyncio.run(main())
    assert caught.value.kind == "proxy"
    assert "S3CRET" not in str(caught.value)


@pytest.mark.parametrize("models", [(), ("a", "b")])
def test_the_model_must_be_clear(models: tuple[str, ...]) -> None:
    async def main(url: str) -> str:
        async with ProbeClient(Endpoint.parse(url, environ={})) as client:
            return await client.choose_model()

    with serving(Fake(models=models)) as url, pytest.raises((ConfigError, UnexpectedAnswer), match=r"a, b|is empty"):
        asyncio.run(main(url))


def test_fields_that_a_server_refuses_are_left_out_from_then_on() -> None:
    seen: list[dict[str, object]] = []

    async def app(scope: dict[str, object], receive: object, send: object) -> None:
        assert callable(receive)
        assert callable(send)
        body = json.loads((await receive())["body"])
        seen.append(body)
        wrong = next((f for f in ("max_tokens", "stream_options") if f in body), None)
        text = {
            "max_tokens": "Unsupported parameter: 'max_tokens'; use 'max_completion_tokens' instead.",
            "stream_options": "unknown field stream_options",
        }.get(wrong or "")
        payload = {"error": {"message": text}} if text else {"choices": [{"message": {"content": "ok"}}]}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 400 if text else 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(payload).encode()})

    async def main(url: str) -> None:
        async with ProbeClient(Endpoint.parse(url, environ={})) as client:
            for _ in range(2):
                assert (await client.stream_chat("m", MESSAGES, 3)).text == "ok"

    with serving(app=app) as url:
        asyncio.run(main(url))
    assert len(seen) == 4
    assert seen[-1]["max_completion_tokens"] == 3
    assert not {"max_tokens", "stream_options"} & set(seen[-1])
