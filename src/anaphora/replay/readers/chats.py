"""Chat logs: JSONL of OpenAI requests, one a line, bare or wrapped as logs and batch files have them.

{"model": "m", "messages": [{"role": "user", "content": "..."}]}
{"timestamp": 1733000000.5, "request": {"messages": [...]}, "response": {"usage": {"completion_tokens": 20}}}
{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"prompt": "..."}}

Times: `timestamp`, `time`, `created` or `created_at`, as seconds or milliseconds since 1970 or as ISO 8601.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from anaphora.errors import AnaphoraError
from anaphora.replay.readers.base import MOST_SECONDS, BadLine, TraceRequest, json_row, peek

Tokenize = Callable[[Mapping[str, Any]], list[int]]
"""An OpenAI request -> the token ids of its prompt. May raise errors of ours for requests that have none."""

_WRAPPERS = ("request", "body", "request_body", "params")
_TIMES = ("timestamp", "time", "created", "created_at")
_BYTES = "Without --tokenizer every byte counts as a token: some four times too many tokens."
_UNTIMED = "Requests without a time are taken to come one a second, so times mean nothing."
_MILLISECONDS = 1e11
"""Seconds since 1970 stay below for three thousand years, milliseconds above since 1973."""


class Chats:
    title = "chat log"

    def __init__(self, tokenize: Tokenize | None = None) -> None:
        self._tokenize = tokenize or bytes_of
        self._count = -1
        self._timed = True

    @property
    def remark(self) -> str:
        untold = [] if self._tokenize is not bytes_of else [_BYTES]
        return " ".join(untold if self._timed else [*untold, _UNTIMED])

    def recognises(self, line: str) -> bool:
        return _request_of(peek(line)) is not None

    def parse(self, line: str) -> TraceRequest:
        row = json_row(line)
        request = _request_of(row)
        if request is None:
            raise BadLine("no `messages` and no `prompt`; a line must hold an OpenAI request")
        self._count += 1
        arrival = _time_of(row)
        if arrival is None:
            self._timed, arrival = False, float(self._count)
        try:
            tokens = self._tokenize(request)
        except AnaphoraError as error:
            raise BadLine(str(error)) from None
        except RecursionError:
            raise BadLine("the request is nested too deeply") from None
        salt = "\0".join(str(request.get(key, "")) for key in ("model", "cache_salt"))
        return TraceRequest(arrival, len(tokens), _output_of(row), token_ids=tokens, salt=salt)


def bytes_of(request: Mapping[str, Any]) -> list[int]:
    """The prompt's UTF-8 bytes, with each message's role: what begins alike as text begins alike here."""
    prompt = request.get("prompt")
    if prompt is not None:
        return list(_text(prompt).encode("utf-8", "surrogatepass"))
    parts = [_text(request[key]) for key in ("tools",) if request.get(key)]
    for message in request["messages"]:
        if not isinstance(message, dict):
            raise BadLine("a message is not a JSON object")
        rest = {key: value for key, value in message.items() if key not in ("role", "content") and value}
        parts.append(f"<{message.get('role')}>{_text(message.get('content'))}{_text(rest) if rest else ''}")
    return list("\n".join(parts).encode("utf-8", "surrogatepass"))


def _text(value: Any) -> str:
    match value:
        case str():
            return value
        case None:
            return ""
        case list():
            return "\n".join(map(_text, value))
        case {"text": str(text)}:
            return text
    return repr(value)


def _request_of(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for found in (row, *(row.get(name) for name in _WRAPPERS)):
        if isinstance(found, dict) and (
            isinstance(found.get("messages"), list) or isinstance(found.get("prompt"), str | list)
        ):
            return found
    return None


def _time_of(row: Mapping[str, Any]) -> float | None:
    value = next((row[key] for key in _TIMES if row.get(key) is not None), None)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            raise BadLine(f"{value[:40]!r} is no time; write ISO 8601 or seconds since 1970") from None
        return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1000 * MOST_SECONDS:
        raise BadLine(f"{value!r} is no time; write ISO 8601 or seconds since 1970")
    return value / 1000 if value > _MILLISECONDS else float(value)


def _output_of(row: Mapping[str, Any]) -> int:
    response = row.get("response")
    usage = (response if isinstance(response, dict) else row).get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if type(tokens) is int and tokens >= 0 else 0
