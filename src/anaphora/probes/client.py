"""One open connection pool to an endpoint: JSON calls, and timed streams that adapt to what the server accepts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from anaphora.errors import ConfigError, EndpointRefused, ProbeError, UnexpectedAnswer
from anaphora.probes.answers import from_transport, read_json
from anaphora.probes.endpoint import Endpoint
from anaphora.probes.stream import StreamResult, read_stream

Messages = Sequence[Mapping[str, Any]]


class ProbeClient:
    """Async context manager. Redirects are not followed and the environment is not consulted again.

    Raises ProbeError from every call. State changes: after a refusal that names one of OpenAI's optional fields,
    later requests go without it (`stream_options`) or with its newer name (`max_completion_tokens`).
    """

    def __init__(self, endpoint: Endpoint, *, max_connections: int = 16) -> None:
        self.endpoint = endpoint
        self.token_limit_field = "max_tokens"
        self.stream_options = True
        secure = endpoint.api_base.startswith("https:") or (endpoint.proxy.proxy or "").startswith("https:")
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        try:
            self.http = httpx.AsyncClient(
                headers={"User-Agent": "anaphora", **endpoint.request_headers()},
                timeout=httpx.Timeout(endpoint.timeout, connect=min(10.0, endpoint.timeout)),
                limits=limits,
                proxy=endpoint.proxy.proxy,
                verify=httpx.create_ssl_context() if secure else False,  # reading the CA bundle takes a while
                trust_env=False,
            )
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"The proxy of {endpoint.proxy.variable} cannot be used ({error}); give an http:// proxy, "
                f"or add {endpoint.host} to NO_PROXY."
            ) from None

    async def __aenter__(self) -> ProbeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    def url(self, path: str) -> str:
        """`/v1/...` lies under the API's base, everything else under the root."""
        if path.startswith("/v1/"):
            return self.endpoint.api_base + path.removeprefix("/v1")
        return self.endpoint.root + path

    async def request(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> httpx.Response:
        """The whole answer, whatever its status. Raises EndpointUnreachable or EndpointTimeout."""
        chosen = httpx.USE_CLIENT_DEFAULT if timeout is None else timeout
        try:
            return await self.http.request(method, self.url(path), json=body, timeout=chosen)
        except httpx.DecodingError as error:
            text = f"{path} sent a damaged compressed answer ({error}): a proxy changes it."
            raise UnexpectedAnswer(text, kind="not_json") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise from_transport(error, self.endpoint, streaming=False) from error

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's JSON. Raises ProbeError."""
        return read_json(self.endpoint, await self.request(method, path, body))

    async def find(self, path: str, timeout: float = 5.0) -> httpx.Response | None:
        """GET an optional route: its 2xx answer or None, never an error."""
        try:
            response = await self.request("GET", path, timeout=timeout)
        except ProbeError:
            return None
        return response if response.is_success else None

    async def models(self) -> list[dict[str, Any]]:
        """The entries of /v1/models. Raises ProbeError."""
        found = await self.json("GET", "/v1/models")
        entries = found.get("data", found.get("models")) if isinstance(found, dict) else found
        if not isinstance(entries, list):
            raise UnexpectedAnswer("/v1/models holds no list of models: this is not an OpenAI API.", kind="no_models")
        return [entry for entry in entries if isinstance(entry, dict)]

    async def choose_model(self) -> str:
        """The endpoint's model, or the only one it serves. Raises ConfigError when there are several."""
        if self.endpoint.model is not None:
            return self.endpoint.model
        names = list(dict.fromkeys(str(entry.get("id") or entry.get("name")) for entry in await self.models()))
        if not names:
            raise UnexpectedAnswer("/v1/models is empty: the server has no model loaded; load one.", kind="no_models")
        if len(names) > 1:
            shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
            raise ConfigError(f"The server has {len(names)} models; choose one with --model: {shown}")
        return names[0]

    def chat_body(
        self, model: str, messages: Messages, max_tokens: int, extra: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """A greedy streamed chat in the words this server accepts, as far as earlier answers told."""
        options = {"stream_options": {"include_usage": True}} if self.stream_options else {}
        fields = {"model": model, "messages": list(messages), "temperature": 0, "stream": True, **options}
        return {**fields, self.token_limit_field: max_tokens, **(extra or {})}

    async def stream_chat(
        self, model: str, messages: Messages, max_tokens: int, extra: Mapping[str, Any] | None = None
    ) -> StreamResult:
        """One greedy streamed chat, timed. `extra`: further fields of the body. Raises ProbeError."""
        while True:
            try:
                return await self.stream("/v1/chat/completions", self.chat_body(model, messages, max_tokens, extra))
            except EndpointRefused as error:
                if not self._adapted(error):
                    raise

    async def stream(self, path: str, body: Mapping[str, Any]) -> StreamResult:
        """POST a body with `stream: true`; the chunks and when they came. Raises ProbeError."""
        content = json.dumps(body).encode()
        return await read_stream(self.http, self.endpoint, self.url(path), content)

    def _adapted(self, error: EndpointRefused) -> bool:
        if error.status not in (400, 422):
            return False
        if self.token_limit_field == "max_tokens" and "max_completion_tokens" in error.detail:
            self.token_limit_field = "max_completion_tokens"
            return True
        if self.stream_options and "stream_options" in error.detail:
            self.stream_options = False
            return True
        return False
