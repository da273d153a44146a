"""Is a stream a stream: chunk by chunk, whole, with its end, and soon?"""

from __future__ import annotations

import httpx

from anaphora.errors import ProbeError
from anaphora.probes.answers import from_transport
from anaphora.probes.doctor.finding import Finding
from anaphora.probes.doctor.sayings import say
from anaphora.probes.doctor.visit import Outcome, Visit, user
from anaphora.probes.stream import StreamResult

_LENGTHS = (16, 64, 256)
_LONG_ENOUGH = 0.25
"""Seconds of generation within which an honest stream must have come in several reads."""
_MANY = 8
_PROMPT = "Count from one to three hundred in words."
_COMPRESSED = ("gzip", "br", "deflate", "zstd")
_BY_KIND = {
    "stream_cut": "stream.cut",
    "stream_error": "stream.error",
    "not_json": "stream.not-json",
    "html": "stream.not-json",
}


async def check_streaming(visit: Visit) -> Outcome:
    """State changes: stream."""
    result = None
    for tokens in _LENGTHS:
        try:
            result = await visit.http.stream_chat(visit.chosen, user(_PROMPT), tokens)
        except ProbeError as error:
            finding = _broken(error)
            return Outcome(finding.what, (finding,))
        visit.stream = visit.stream or result
        if not result.incremental or result.reads > 1 or len(result.chunk_times) < _MANY or result.e2e >= _LONG_ENOUGH:
            break
    if result is None:
        raise RuntimeError("no length was tried")
    first = visit.stream or result
    found = _wrong(result)
    if first.ttft >= visit.slow_seconds:
        found.append(say("stream.slow-start", f"prompt of {len(_PROMPT.split())} words", seconds=first.ttft))
    if compressed := await _compressed(visit):
        found.append(compressed)
    evidence = (
        f"{len(result.chunk_times)} content chunks in {result.reads} reads, first after {result.ttft:.3f} s, "
        f"last after {result.e2e:.3f} s, {'[DONE]' if result.done else 'no [DONE]'}"
    )
    return Outcome(evidence, tuple(found))


def _wrong(result: StreamResult) -> list[Finding]:
    chunks = len(result.chunk_times)
    seen = f"{chunks} chunks in {result.reads} reads; first at {result.ttft:.3f} s, last at {result.e2e:.3f} s"
    if not result.incremental:
        return [say("stream.ignored", f"content-type {result.headers.get('content-type', 'missing')}")]
    found = []
    if chunks >= _MANY and result.reads == 1 and result.e2e >= _LONG_ENOUGH:
        found.append(say("stream.buffered", seen))
    if not result.done:
        found.append(say("stream.no-done", seen))
    return found


def _broken(error: ProbeError) -> Finding:
    code = _BY_KIND.get(error.kind, "stream.failed")
    return say(code, str(error), problem=error)


async def _compressed(visit: Visit) -> Finding | None:
    """Ask as browsers and Node do, with compression allowed."""
    client = visit.http.http
    body = {"model": visit.chosen, "messages": user("Hi."), "stream": True, visit.http.token_limit_field: 2}
    try:
        request = client.build_request(
            "POST",
            visit.endpoint.api_base + "/chat/completions",
            json=body,
            headers={"Accept-Encoding": "gzip, deflate, br"},
        )
        answer = await client.send(request, stream=True)
        try:
            coding = answer.headers.get("content-encoding", "")
            async for _ in answer.aiter_raw():
                pass
        finally:
            await answer.aclose()
    except httpx.HTTPError as error:
        return _broken(from_transport(error, visit.endpoint, streaming=True))
    if coding not in _COMPRESSED:
        return None
    return say("stream.compressed", f"content-encoding: {coding}", coding=coding)
