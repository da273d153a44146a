"""Claude Code's settings.json: does its `env` lead to the server, with one key, and keep the prefix cache alive?"""

from __future__ import annotations

import difflib
from typing import Any
from urllib.parse import urlsplit

from anaphora.probes.doctor.base_urls import anthropic_base, flaw
from anaphora.probes.doctor.credentials import check_stored_key
from anaphora.probes.doctor.source import Source
from anaphora.probes.proxies import choose_proxy

KEYS = ("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_KEY")
KNOWN = (
    "ANTHROPIC_BASE_URL",
    *KEYS,
    "ANTHROPIC_CUSTOM_HEADERS",
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
)
_WRONG_NAMES = {
    "ANTHROPIC_URL": "ANTHROPIC_BASE_URL",
    "ANTHROPIC_BASEURL": "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_BASE": "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_BASE_URL": "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_URL": "ANTHROPIC_BASE_URL",
    "ANTHROPIC_TOKEN": "ANTHROPIC_AUTH_TOKEN",
    "ANTHROPIC_KEY": "ANTHROPIC_API_KEY",
}
_OPENAI_ONLY = ("api.openai.com", "api.groq.com", "api.together.xyz", "api.fireworks.ai")
ATTRIBUTION = "CLAUDE_CODE_ATTRIBUTION_HEADER"


def check_settings(source: Source) -> None:
    """State changes: findings and secrets of the source."""
    value = source.value
    if not isinstance(value, dict):
        source.say("file.not-object", 1, kind="settings.json")
        return
    for name in [name for name in value if name.startswith("ANTHROPIC_") or name in ("HTTP_PROXY", "HTTPS_PROXY")]:
        source.say("claude.top-level", source.line_of(name), name=name)
    env = value.get("env")
    env = env if isinstance(env, dict) else {}
    check_env(source, env, ("env",))
    if "apiKeyHelper" in value and any(env.get(name) for name in KEYS):
        source.say("claude.helper", source.line_of("apiKeyHelper"))


def check_env(source: Source, env: dict[str, Any], at: tuple[str, ...] = ()) -> None:
    """The variables that Claude Code reads, wherever they are set (settings.json or a file of variables)."""
    for name, value in env.items():
        if at and isinstance(value, int | float | bool):
            line = source.line_of(*at, name)
            text = str(value).lower() if isinstance(value, bool) else str(value)
            edit = source.edit(line, f": {text}", f': "{text}"', safe=True) or source.edit(line, text, f'"{text}"')
            source.say("claude.not-text", line, edit=edit, name=name, right=f'"{text}"')
        if name.startswith("ANTHROPIC_") and name not in KNOWN:
            _unknown(source, name, at)
    given = [name for name in KEYS if isinstance(env.get(name), str) and env[name].strip()]
    if len(given) == 2:
        source.say("claude.both-keys", source.line_of(*at, KEYS[1]))
    for name in given:
        check_stored_key(source, source.line_of(*at, name), name, env[name])
    url = env.get("ANTHROPIC_BASE_URL")
    if isinstance(url, str) and url.strip() and not url.startswith("$"):
        _check_base(source, env, url, at)


def _check_base(source: Source, env: dict[str, Any], url: str, at: tuple[str, ...]) -> None:
    line, right = source.line_of(*at, "ANTHROPIC_BASE_URL"), anthropic_base(url)
    if problem := flaw(url, right):
        edit = source.edit(line, url, right or "", safe=right is not None)
        source.say("base.anthropic", line, edit=edit, problem=problem, right=right or "http://127.0.0.1:8000")
    host = urlsplit(right or "").hostname or ""
    if host in _OPENAI_ONLY:
        source.say("claude.openai-only", line, host=host)
    if host.endswith("anthropic.com") or not host:
        return
    if not any(env.get(name) for name in KEYS) and "apiKeyHelper" not in (source.value or {}):
        source.say("claude.no-key", line)
    if not env.get("ANTHROPIC_DEFAULT_HAIKU_MODEL") and not env.get("ANTHROPIC_SMALL_FAST_MODEL"):
        source.say("claude.haiku", line)
    if str(env.get(ATTRIBUTION, "")).strip().lower() not in ("0", "false"):
        source.say("claude.attribution", line)
    variables = {name: value for name, value in env.items() if isinstance(value, str)}
    choice = choose_proxy(right or "", variables)
    if choice.overruled:
        source.say("claude.proxy", source.line_of(*at, choice.variable or ""), variable=choice.variable, host=host)


def _unknown(source: Source, name: str, at: tuple[str, ...]) -> None:
    near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.8)
    right = _WRONG_NAMES.get(name) or (near[0] if near else None)
    if right is not None:
        line = source.line_of(*at, name)
        source.say(
            "claude.name", line, edit=source.edit(line, name, right, safe=name in _WRONG_NAMES), name=name, right=right
        )
