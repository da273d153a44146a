"""What the OpenAPI document says of answers other than the plain one."""

from __future__ import annotations

from typing import Any

from anaphora.server.responses import ErrorBody, Health

_MEANING = {
    400: "The request is wrong; the message says where and what to change.",
    401: "No API key, or not one of the server's.",
    404: "No such model, or no such request.",
    413: "The body is too large.",
    415: "The body is not declared to be JSON.",
    429: "The queue is full; see the header Retry-After.",
    500: "A bug of the server; its log has the details.",
    503: "The engine is loading, shutting down or has failed; see the header Retry-After.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorBody, "description": _MEANING[status]} for status in statuses}


BODY_ERRORS = errors(400, 401, 404, 413, 415, 500, 503)
GENERATION: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole answer, or with `stream: true` chunks of it as server-sent events.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    **BODY_ERRORS,
    **errors(429),
}
HEALTH: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not ready; the reason says why."}}
