"""From exceptions to HTTP: one table of statuses, one body, and no traceback for the client."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from difflib import get_close_matches

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from anaphora.errors import (
    AnaphoraError,
    AuthenticationFailed,
    BodyTooLarge,
    EngineUnavailable,
    InvalidRequest,
    QueueFull,
    RequestError,
    UnknownModel,
    UnknownRequest,
)
from anaphora.server.responses import ErrorBody, ErrorDetail
from anaphora.server.validation import refusal, unreadable_body

logger = logging.getLogger("anaphora.server")


class RouteNotFound(RequestError):
    """No such route."""

    code = "route_not_found"


class MethodNotAllowed(RequestError):
    """The route exists, the method does not."""

    code = "method_not_allowed"


class UnsupportedMediaType(RequestError):
    """The body was not declared to be JSON."""

    code = "unsupported_media_type"


class GenerationFailed(RequestError):
    """The engine gave up on a request that it had accepted."""

    code = "generation_failed"


class Unexpected(RequestError):
    """A bug of ours; the message holds nothing but the id under which the log has the rest."""

    code = "internal_error"


class ClientDisconnected(AnaphoraError):
    """The client went away; nobody reads the answer."""


STATUS: Mapping[type[AnaphoraError], tuple[int, str]] = {
    InvalidRequest: (400, "invalid_request_error"),
    AuthenticationFailed: (401, "authentication_error"),
    UnknownModel: (404, "invalid_request_error"),
    UnknownRequest: (404, "invalid_request_error"),
    RouteNotFound: (404, "invalid_request_error"),
    MethodNotAllowed: (405, "invalid_request_error"),
    BodyTooLarge: (413, "invalid_request_error"),
    UnsupportedMediaType: (415, "invalid_request_error"),
    QueueFull: (429, "rate_limit_error"),
    GenerationFailed: (500, "server_error"),
    Unexpected: (500, "server_error"),
    EngineUnavailable: (503, "server_error"),
}
"""Exception class -> HTTP status and OpenAI error type; a class without a line has that of its base."""

RETRY_AFTER_SECONDS = 5
"""For an engine that is loading or draining."""

_MAX_CHARACTERS = 2000


def status_and_type(error: RequestError) -> tuple[int, str]:
    return next((STATUS[cls] for cls in type(error).__mro__ if cls in STATUS), STATUS[Unexpected])


def error_body(error: RequestError) -> ErrorBody:
    kind = status_and_type(error)[1]
    param = None if error.param is None else _presentable(error.param)
    return ErrorBody(error=ErrorDetail(message=_presentable(str(error)), type=kind, param=param, code=error.code))


def _presentable(text: str) -> str:
    """Names that a client made up come back in messages: whatever they hold can be written, and at bounded length."""
    kept = text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "…"
    return kept.encode(errors="replace").decode()


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The OpenAI-shaped answer, with the headers that HTTP asks for beside some statuses."""
    extra = dict(headers or {})
    if isinstance(error, AuthenticationFailed):
        extra["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, QueueFull):
        extra["Retry-After"] = str(error.retry_after)
    elif isinstance(error, EngineUnavailable):
        extra["Retry-After"] = str(RETRY_AFTER_SECONDS)
    return JSONResponse(error_body(error).model_dump(), status_and_type(error)[0], extra)


def as_request_error(error: Exception) -> RequestError:
    """The error itself if it is meant for clients; else logs it under a short id and gives only that away."""
    if isinstance(error, RequestError):
        return error
    error_id = secrets.token_hex(4)
    logger.error("internal error %s", error_id, exc_info=error)
    return Unexpected(f"Internal error {error_id}. The server's log has the details under this id.")


def install_handlers(app: FastAPI) -> None:
    """Answer every error of the framework and of the routes in the one shape."""

    async def request_error(request: Request, error: Exception) -> JSONResponse:
        return error_response(as_request_error(error))

    async def nobody_reads(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    async def validation_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        if isinstance(error.body, bytes):
            return error_response(
                UnsupportedMediaType("The body must be JSON: send it with the header `Content-Type: application/json`.")
            )
        return error_response(refusal(error))

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return error_response(_translate(error, request), error.headers)

    app.add_exception_handler(AnaphoraError, request_error)
    app.add_exception_handler(ClientDisconnected, nobody_reads)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)


def _translate(error: HTTPException, request: Request) -> RequestError:
    method, path = request.method, request.url.path
    if error.status_code == 404:
        near = get_close_matches(path, request.app.state.paths, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else f"Routes: {', '.join(request.app.state.paths)}."
        return RouteNotFound(f"There is no route {method} {path}. {hint}")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return MethodNotAllowed(f"{path} does not take {method}; use {allowed}.")
    if error.status_code == 400 and error.__cause__ is not None:
        return unreadable_body(error.__cause__)
    return as_request_error(error)
