"""Codex: config.toml and auth.json."""

from __future__ import annotations

import difflib
import re
import time
from typing import Any

from anaphora.probes.doctor.credentials import check_committed, check_mode, check_openai_base, check_stored_key
from anaphora.probes.doctor.keys import expired_at
from anaphora.probes.doctor.source import Source

PROVIDER_KEYS = (
    "name", "base_url", "env_key", "env_key_instructions", "experimental_bearer_token", "auth", "aws", "wire_api",
    "query_params", "http_headers", "env_http_headers", "request_max_retries", "stream_max_retries",
    "stream_idle_timeout_ms", "websocket_connect_timeout_ms", "requires_openai_auth", "supports_websockets",
)  # fmt: skip
_RENEWED = (
    "auth.json: the access token has run out; Codex renews it with its refresh token. Where that fails "
    '("refresh token already used": parallel sessions share this file) type codex login'
)
_RESERVED = ("openai", "ollama", "lmstudio")
_ROOT_KEYS = ("model", "model_provider", "approval_policy", "sandbox_mode", "model_reasoning_effort",
              "model_context_window", "model_max_output_tokens")  # fmt: skip
"""Keys that people append to the end of the file, where a table swallows them."""


def check_config(source: Source) -> None:
    """State changes: findings and secrets of the source."""
    value: dict[str, Any] = source.value
    if "profile" in value:
        source.say("codex.profile", source.line_of("profile"), name=value["profile"])
    if value.get("approval_policy") == "untrusted":
        source.say("codex.approval", source.line_of("approval_policy"))
    if "api_key" in value:
        source.say("codex.api-key", source.line_of("api_key"))
        check_stored_key(source, source.line_of("api_key"), "api_key", value["api_key"])
    providers = value.get("model_providers")
    providers = providers if isinstance(providers, dict) else {}
    chosen = value.get("model_provider")
    if chosen is not None and chosen not in providers and chosen not in _RESERVED:
        near = difflib.get_close_matches(str(chosen), providers, n=1, cutoff=0.4)
        line = source.line_of("model_provider")
        edit = source.edit(line, str(chosen), near[0]) if near else None
        source.say("codex.provider", line, edit=edit, name=chosen, known=", ".join(providers) or "none")
    for table, inner in value.items():
        if isinstance(inner, dict) and table != "profiles":
            _swallowed(source, (table,), inner)
    for name, provider in providers.items():
        if isinstance(provider, dict):
            _check_provider(source, name, provider)
    if chosen and "model" not in value:
        source.say("codex.no-model", source.line_of("model_provider"))


def _check_provider(source: Source, name: str, provider: dict[str, Any]) -> None:
    def line(key: str) -> int | None:
        return source.line_of("model_providers", name, key)

    if name in _RESERVED:
        source.say("codex.reserved", line(""), name=name)
    if provider.get("wire_api", "responses") != "responses":
        edit = source.edit(line("wire_api"), str(provider["wire_api"]), "responses", safe=True)
        source.say("codex.wire-api", line("wire_api"), edit=edit, value=provider["wire_api"])
    url = provider.get("base_url")
    if isinstance(url, str):
        check_openai_base(source, line("base_url"), "Codex", "base_url", url)
    elif "aws" not in provider:
        source.say("codex.no-base", line(""), name=name)
    key_variable = provider.get("env_key")
    if isinstance(key_variable, str) and not re.fullmatch(r"[A-Z_][A-Za-z0-9_]*", key_variable):
        source.secrets.append(key_variable.lstrip("$"))
        source.say("codex.env-key", line("env_key"))
    if isinstance(provider.get("experimental_bearer_token"), str):
        check_stored_key(source, line("experimental_bearer_token"), "experimental_bearer_token",
                         provider["experimental_bearer_token"])  # fmt: skip
    others = [key for key in ("env_key", "experimental_bearer_token", "requires_openai_auth") if provider.get(key)]
    if provider.get("auth") and others:
        source.say("codex.auth-twice", line("auth"), others=", ".join(others))
    for key in provider:
        if key not in PROVIDER_KEYS and key not in _ROOT_KEYS:
            _unknown(source, line(key), key, provider[key])


def _unknown(source: Source, line: int | None, key: str, value: Any) -> None:
    if key == "api_key":
        check_stored_key(source, line, key, value)
        source.say("codex.api-key", line)
        return
    near = difflib.get_close_matches(key, PROVIDER_KEYS, n=1, cutoff=0.7)
    edit = source.edit(line, key, near[0]) if near else None
    source.say("codex.key", line, edit=edit, key=key, near=f"; did you mean {near[0]}?" if near else "")


def _swallowed(source: Source, path: tuple[str, ...], table: dict[str, Any]) -> None:
    """Keys of the root that stand after a table's header and so belong to it."""
    for key, value in table.items():
        if isinstance(value, dict):
            _swallowed(source, (*path, key), value)
        elif key in _ROOT_KEYS and path[0] in ("model_providers", "mcp_servers", "projects", "tui", "history"):
            source.say("codex.swallowed", source.line_of(*path, key), key=key, table=".".join(path))


def check_auth_file(source: Source) -> None:
    """auth.json as `codex login` writes it."""
    value = source.value
    if not isinstance(value, dict):
        source.say("file.not-object", 1, kind="auth.json")
        return
    check_mode(source)
    key, tokens = value.get("OPENAI_API_KEY"), value.get("tokens")
    tokens = tokens if isinstance(tokens, dict) else {}
    source.secrets += [token for token in tokens.values() if isinstance(token, str) and token]
    if isinstance(value.get("personal_access_token"), str):
        source.secrets.append(value["personal_access_token"])
    if key:
        check_stored_key(source, source.line_of("OPENAI_API_KEY"), "OPENAI_API_KEY", key)
    elif tokens:
        check_committed(source, source.line_of("tokens"), "tokens")
    others = value.get("personal_access_token") or value.get("agent_identity")
    if not key and not any(tokens.values()) and not others:
        source.say("codex.logged-out", 1)
    if value.get("auth_mode") == "apikey" and not key:
        source.say("codex.mode", source.line_of("auth_mode"))
    ended = expired_at(str(tokens.get("access_token", "")))
    if ended is not None and not tokens.get("refresh_token"):
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(ended))
        source.say("key.expired", source.line_of("tokens", "access_token"), name="access_token", when=when)
    elif ended is not None:
        source.notes.append(_RENEWED)
