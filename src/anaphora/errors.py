"""One exception tree. Every message says what is wrong and what to do next.

AnaphoraError
|- InputError            what the user gave is wrong                      (exit 2)
|  |- ConfigError        an option or a key of a config file
|  |- ModelNotFound      no such model here
|  |- HardwareNotFound   no such device in the catalogue
|  |- UnsupportedModel   a model that cannot run, by name, with the reason
|  `- CorruptModel       a model file that is missing, cut short or wrong, by name
|- DownloadError         the other side failed                            (exit 3)
|- ProbeError            an endpoint under test failed; `kind` counts it  (exit 3)
|  |- EndpointUnreachable   no HTTP answer: DNS, TCP, TLS or a proxy
|  |- EndpointTimeout       no answer in time
|  |- EndpointRefused       an HTTP status or an error event that says no
|  |- UnexpectedAnswer      an answer, but not that of an OpenAI-compatible API
|  `- StreamCut             a stream that ended before its end
|- RequestError          one request is wrong; the server goes on         (HTTP, see server/errors.py)
|  |- InvalidRequest     |- UnsupportedField   |- ContextTooLong  |- RequestNeverFits
|  |- UnknownModel       |- UnknownRequest    |- AuthenticationFailed  |- BodyTooLarge
|  |- QueueFull          `- EngineUnavailable
|- OutOfBlocks           the pool cannot give what was asked; the caller preempts
`- BlockStateError       a bug of ours: an illegal move of a block
"""

from __future__ import annotations


class AnaphoraError(Exception):
    """Root of everything Anaphora raises on purpose."""

    exit_code = 1


class InputError(AnaphoraError):
    """What the user gave cannot be used."""

    exit_code = 2


class ConfigError(InputError):
    """An option, or a key of a configuration file, is unknown, outdated or impossible."""


class ModelNotFound(InputError):
    """No model of that name is here or can be fetched."""


class HardwareNotFound(InputError):
    """No device of that name is known, or the name leaves open how much memory it has."""


class UnsupportedModel(InputError):
    """The model is well formed but cannot run here; the message names it and says why."""


class CorruptModel(InputError):
    """A file of the model is missing, cut short or holds impossible values; the message names the file."""


class DownloadError(AnaphoraError):
    """A download failed or did not match its digest; nothing half-made was left behind."""

    exit_code = 3


class ProbeError(AnaphoraError):
    """An endpoint under test failed. `kind` is a short stable word for counting: "dns", "http_401", "html" ..."""

    exit_code = 3

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class EndpointUnreachable(ProbeError):
    """No HTTP answer came: "dns", "refused", "reset", "tls", "proxy", "connect" or "protocol"."""


class EndpointTimeout(ProbeError):
    """Nothing came in time: "connect_timeout", "read_timeout", "write_timeout" or "pool_timeout"."""


class EndpointRefused(ProbeError):
    """The endpoint said no: "http_STATUS", or "stream_error" for an error inside a stream (status 200)."""

    def __init__(self, message: str, *, kind: str, status: int, detail: str = "") -> None:
        super().__init__(message, kind=kind)
        self.status = status
        self.detail = detail
        """The endpoint's own words, redacted."""


class UnexpectedAnswer(ProbeError):
    """An answer of another kind: "html", "redirect", "not_json", "empty", "no_choices" or "no_models"."""


class StreamCut(ProbeError):
    """A stream broke off before its last chunk: "stream_cut"."""


class RequestError(AnaphoraError):
    """One request is refused. `param` names the field, `code` is OpenAI's short word for it."""

    exit_code = 2
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(RequestError):
    """A field has a wrong type or an impossible value."""


class UnsupportedField(InvalidRequest):
    """A field that would change the answer is not supported."""

    code = "unsupported_parameter"


class ContextTooLong(InvalidRequest):
    """Prompt, or prompt plus `max_tokens`, is longer than the context."""

    code = "context_length_exceeded"


class RequestNeverFits(InvalidRequest):
    """The request needs more blocks than the whole pool has."""

    code = "kv_pool_too_small"


class UnknownModel(RequestError):
    """The request names a model that is not served."""

    code = "model_not_found"


class UnknownRequest(RequestError):
    """Nothing is remembered of the request that was asked about."""

    code = "request_not_found"


class AuthenticationFailed(RequestError):
    """No key, or not one of the server's keys."""

    code = "invalid_api_key"


class BodyTooLarge(RequestError):
    """The request's body is larger than the server takes."""

    code = "request_too_large"


class QueueFull(RequestError):
    """Too many requests wait already; `retry_after` is in seconds."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineUnavailable(RequestError):
    """The engine is still loading, is shutting down, or has failed."""

    code = "engine_unavailable"


class OutOfBlocks(AnaphoraError):
    """The pool has fewer free and evictable blocks than were asked for; nothing was changed."""


class BlockStateError(AnaphoraError):
    """An illegal move of a block: always a bug in Anaphora, never the user's fault."""
