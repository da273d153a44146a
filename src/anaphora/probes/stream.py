"""A streamed answer and its times, on raw HTTP: nothing between the socket and the clock but the SSE lines.

TTFT = first content chunk - request sent. ITL = gap between content chunks. TPOT = (last chunk - first chunk) /
(tokens - 1). E2E = last chunk - request sent. "Sent" is when the first byte of the request goes out, so opening the
connection is not in it (`connect_seconds` has that).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from anaphora.errors import EndpointRefused, StreamCut, UnexpectedAnswer
from anaphora.probes.answers import check_status, error_detail, from_transport, is_html, parse_json
from anaphora.probes.endpoint import Endpoint


@dataclass(slots=True)
class StreamResult:
    """All times in seconds; `sent` on the clock of `time.perf_counter`, the others since `sent`."""

    sent: float
    connect_seconds: float = 0.0
    """Opening the connection; 0 where an open one was used."""
    headers_at: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    """Arrival of each chunk that held content (text, reasoning or tool calls)."""
    answer_at: float | None = None
    """Arrival of the first chunk that was not reasoning."""
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the server says it reused; None where it does not say."""
    done: bool = False
    """`[DONE]` came."""
    incremental: bool = True
    """False where the server answered with one JSON object although a stream was asked for."""
    reads: int = 0
    """Reads of the socket that brought content: 1 for many chunks means that something buffered them."""
    end_at: float = 0.0
    """Arrival of the last byte."""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        """Seconds to the first content chunk; to the end where there was none (the first token ended the answer)."""
        return self.chunk_times[0] if self.chunk_times else self.end_at

    @property
    def e2e(self) -> float:
        return self.chunk_times[-1] if self.chunk_times else self.end_at

    @property
    def itls(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]

    @property
    def tpot(self) -> float | None:
        """None for fewer than two tokens. Tokens are the server's count, else the number of chunks."""
        tokens = self.completion_tokens or len(self.chunk_times)
        if tokens < 2 or len(self.chunk_times) < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (tokens - 1)


async def read_stream(client: httpx.AsyncClient, endpoint: Endpoint, url: str, content: bytes) -> StreamResult:
    """POST `content` (JSON) and read the answer to its end. Raises ProbeError."""
    began = time.perf_counter()
    sent_at: list[float] = []

    async def trace(event: str, _info: object) -> None:
        if event.endswith("send_request_headers.started"):
            sent_at.append(time.perf_counter())

    headers = {"Content-Type": "application/json", "Accept": "text/event-stream", "Accept-Encoding": "identity"}
    started = False
    try:
        request = client.build_request("POST", url, content=content, headers=headers, extensions={"trace": trace})
        response = await client.send(request, stream=True)
        try:
            started = True
            sent = sent_at[-1] if sent_at else began
            result = StreamResult(sent, sent - began, time.perf_counter() - sent, headers=dict(response.headers))
            if not response.is_success:
                await response.aread()
                check_status(endpoint, response, response.text)
            if "event-stream" in response.headers.get("content-type", ""):
                events = EventReader(result, endpoint)
                async for data in response.aiter_bytes():
                    events.feed(data, time.perf_counter() - sent)
                events.finish(time.perf_counter() - sent)
            else:
                text = (await response.aread()).decode(errors="replace")
                read_whole(text, time.perf_counter() - sent, result, endpoint, request.url.path)
        finally:
            await response.aclose()
    except httpx.DecodingError as error:
        raise StreamCut(f"The compressed stream is damaged ({error}): a proxy changes it.", kind="stream_cut") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise from_transport(error, endpoint, streaming=started) from error
    return result


class EventReader:
    """Server-sent events, read by read. State changes: the result it was given. Raises ProbeError."""

    def __init__(self, result: StreamResult, endpoint: Endpoint) -> None:
        self._result = result
        self._endpoint = endpoint
        self._tail = b""
        self._begun = False

    def feed(self, data: bytes, at: float) -> None:
        """One read of the body, `at` seconds after the request was sent."""
        if not self._begun and is_html(data[:200].decode(errors="replace")):
            raise UnexpectedAnswer("The stream is an HTML page: a proxy or web page answers.", kind="html")
        self._begun = True
        *lines, self._tail = (self._tail + data).split(b"\n")
        _take(lines, at, self._result, self._endpoint)

    def finish(self, at: float) -> None:
        """The body ended."""
        result = self._result
        result.end_at = at
        with suppress(UnexpectedAnswer):  # an event without its end was cut, and that is told below
            _take([self._tail], at, result, self._endpoint)
        if not result.done and result.finish_reason is None:
            raise StreamCut(
                f"The stream ended after {len(result.chunk_times)} content chunks without finish_reason or [DONE]: "
                "the server or a proxy before it closed it early.",
                kind="stream_cut",
            )


def _take(lines: Iterable[bytes], at: float, result: StreamResult, endpoint: Endpoint) -> None:
    before = len(result.chunk_times)
    for payload in _payloads(lines):
        if payload == b"[DONE]":
            result.done = True
            continue
        try:
            chunk = json.loads(payload)
        except ValueError:
            shown = endpoint.redact(payload[:80].decode(errors="replace"))
            raise UnexpectedAnswer(f"An event of the stream is not JSON: {shown!r}", kind="not_json") from None
        _take_chunk(chunk, at, result, endpoint)
    result.reads += len(result.chunk_times) > before


def _payloads(lines: Iterable[bytes]) -> Iterator[bytes]:
    for line in lines:
        if line.startswith(b"data:") and (payload := line[5:].strip()):
            yield payload


def _take_chunk(chunk: Any, at: float, result: StreamResult, endpoint: Endpoint) -> None:
    if not isinstance(chunk, dict):
        return
    if chunk.get("error"):
        detail = endpoint.redact(error_detail(json.dumps(chunk)))
        raise EndpointRefused(
            f'The stream ended in an error of the server: "{detail}"', kind="stream_error", status=200, detail=detail
        )
    _take_usage(chunk, result)
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or choice.get("message") or {}
        text = delta.get("content") or choice.get("text") or ""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        if text or reasoning or delta.get("tool_calls"):
            result.chunk_times.append(at)
            result.text += text
            result.reasoning += reasoning if isinstance(reasoning, str) else ""
            if not reasoning and result.answer_at is None:
                result.answer_at = at
        result.finish_reason = choice.get("finish_reason") or result.finish_reason


def read_whole(text: str, at: float, result: StreamResult, endpoint: Endpoint, path: str) -> None:
    """An answer that is one JSON object, come `at` seconds after the request was sent. Raises ProbeError."""
    result.incremental = False
    result.end_at = at
    answer = parse_json(endpoint, text, path)
    if not isinstance(answer, dict) or not (answer.get("choices") or answer.get("error")):
        raise UnexpectedAnswer(f"{path} answered with JSON that has no `choices`.", kind="no_choices")
    _take_chunk(answer, result.end_at, result, endpoint)
    result.reads = 1


def _take_usage(chunk: dict[str, Any], result: StreamResult) -> None:
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        result.prompt_tokens = _count(usage.get("prompt_tokens"), result.prompt_tokens)
        result.completion_tokens = _count(usage.get("completion_tokens"), result.completion_tokens)
        result.cached_tokens = _count(cached_tokens(usage), result.cached_tokens)
    timings = chunk.get("timings")  # llama-server's own
    if isinstance(timings, dict):
        result.cached_tokens = _count(timings.get("cache_n"), result.cached_tokens)


def cached_tokens(usage: dict[str, Any]) -> Any:
    """The reused prompt tokens of a `usage` object, under the names that OpenAI, DeepSeek and Anthropic gave them."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    if isinstance(details, dict) and details.get("cached_tokens") is not None:
        return details["cached_tokens"]
    return usage.get("prompt_cache_hit_tokens", usage.get("cache_read_input_tokens"))


def _count(value: Any, otherwise: int | None) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise
