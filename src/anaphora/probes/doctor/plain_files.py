"""Files of variables, and JSON files that hold a base URL, a key and a model for some client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from anaphora.probes.doctor.claude_code import check_env
from anaphora.probes.doctor.credentials import check_openai_base, check_stored_key
from anaphora.probes.doctor.source import Path_, Source
from anaphora.probes.proxies import choose_proxy

_ASSIGNMENT = re.compile(r"^\s*(export\s+)?([A-Za-z_]\w*)(\s*)=(\s*)(.*?)\s*$")
_KEY_NAME = re.compile(r"(?i)(?:^|_)(?:api_?key|auth_?token|access_?token|bearer_?token|token|secret|hf_token)$")
_URL_NAMES = ("api_base", "base_url", "openai_base_url", "openai_api_base", "apibase", "baseurl", "api_base_url")
_OPENAI_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_BASE_URL")
_OUTDATED = {"OPENAI_API_BASE": "OPENAI_BASE_URL", "OLLAMA_NUM_CTX": "OLLAMA_CONTEXT_LENGTH",
             "VLLM_CPU_KV_CACHE_SPACE": "VLLM_CPU_KVCACHE_SPACE"}  # fmt: skip
"""Variables that nobody reads (any more), and those that are read."""


def read_variables(source: Source) -> None:
    """A .env file. State changes: value, where, findings, secrets."""
    found: dict[str, str] = {}
    for number, line in enumerate(source.lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _ASSIGNMENT.match(line)
        if not match:
            source.say("env.line", number)
            continue
        _, name, before, after, raw = match.groups()
        if before or after:
            edit = source.edit(number, f"{name}{before}={after}", f"{name}=", safe=True)
            source.say("env.spaces", number, edit=edit, name=name)
        if len(raw) > 1 and raw[0] in "\"'" and not re.match(r"(['\"]).*\1\s*(?:#.*)?$", raw):
            source.say("env.quote", number, name=name)
        value = re.sub(r"^(['\"])(.*)\1.*$", r"\2", raw) if raw[:1] in ("'", '"') else raw.partition(" #")[0].strip()
        if name in found:
            source.say("file.twice", number, key=name)
        found[name] = value
        source.where[(name,)] = number
    source.value = found
    _check_variables(source, found)


def _check_variables(source: Source, found: dict[str, str]) -> None:
    if any(name.startswith(("ANTHROPIC_", "CLAUDE_CODE_")) for name in found):
        check_env(source, dict(found))
    for name, value in found.items():
        line = source.line_of(name)
        if name in _OUTDATED:
            edit = source.edit(line, name, _OUTDATED[name], safe=_OUTDATED[name] not in found)
            source.say("env.outdated", line, edit=edit, name=name, right=_OUTDATED[name])
        if _KEY_NAME.search(name) and not name.startswith("ANTHROPIC_"):
            check_stored_key(source, line, name, value)
        if name in _OPENAI_VARIABLES and value:
            check_openai_base(source, line, "OpenAI clients", name, value)
    urls = [value for name, value in found.items() if name.endswith(("_BASE_URL", "_API_BASE")) and "://" in value]
    for url in urls:
        choice = choose_proxy(url, found)
        if choice.overruled:
            source.say("env.proxy", source.line_of(choice.variable or ""), variable=choice.variable, url=url)


def check_generic(source: Source) -> None:
    """JSON of a client nobody knows: whatever is called api_base, api_key or model in it."""
    seen_url = seen_key = seen_model = False
    for path, value in _leaves(source.value, ()):
        name = str(path[-1]) if path else ""
        line = source.line_of(*path)
        if name.lower().replace("-", "_") in _URL_NAMES and isinstance(value, str):
            seen_url = True
            check_openai_base(source, line, "OpenAI clients", name, value)
        elif _KEY_NAME.search(name) and isinstance(value, str):
            seen_key = True
            check_stored_key(source, line, name, value)
            if not value.strip():
                source.say("generic.empty", line, name=name)
        elif name.lower() in ("model", "model_id", "model_name"):
            seen_model = True
            if not value:
                source.say("generic.empty", line, name=name)
    if seen_url and not seen_model:
        source.notes.append(f"{source.path.name}: a base URL but no model; the client must be told one elsewhere")
    if seen_key and not seen_url:
        source.notes.append(f"{source.path.name}: a key but no base URL; the client goes to its own default")


def _leaves(value: Any, path: Path_) -> Iterator[tuple[Path_, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, value
