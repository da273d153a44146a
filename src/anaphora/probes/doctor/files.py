"""A file -> what kind it is -> its linters."""

from __future__ import annotations

import tomllib
from pathlib import Path

from anaphora.errors import ConfigError
from anaphora.probes.doctor import claude_code, codex, jsonc, plain_files
from anaphora.probes.doctor.engine_line import commands_in, read_launch
from anaphora.probes.doctor.engine_options import check_launch
from anaphora.probes.doctor.source import Source, toml_lines
from anaphora.probes.doctor.yaml_files import read_yaml

_STRICT = ("auth.json",)
"""Read by strict parsers: a comment breaks them."""


def lint(path: Path) -> Source:
    """Everything found in one file. Raises ConfigError for what cannot be read at all."""
    return lint_source(Source.read(path))


def lint_source(source: Source) -> Source:
    """State changes: the source's findings, launches and secrets."""
    name, suffix = source.path.name.lower(), source.path.suffix.lower()
    if suffix in (".json", ".jsonc"):
        _read_json(source)
    elif suffix == ".toml":
        _read_toml(source)
    elif suffix in (".yaml", ".yml"):
        read_yaml(source)
    elif name.startswith(".env") or suffix == ".env" or name.endswith("env"):
        source.kind = "variables"
        plain_files.read_variables(source)
    else:
        source.kind = "commands"
        launches = (read_launch(words, source.lines) for words in commands_in(source.text))
        source.launches += [launch for launch in launches if launch is not None]
        if not source.launches:
            source.notes.append(
                f"{source.path.name}: no vllm, sglang or llama-server command and no configuration in it"
            )
    for launch in source.launches:
        check_launch(source, launch)
    source.findings.sort(key=lambda finding: finding.line or 0)
    return source


def _read_json(source: Source) -> None:
    try:
        parsed = jsonc.parse(source.text)
    except ConfigError as error:
        line = int("".join(c for c in str(error).partition(" is ")[0] if c.isdigit()) or 1)
        source.say("json.broken", line, problem=str(error).partition(": ")[2])
        return
    source.value, source.where = parsed.value, parsed.where
    for line in parsed.comments if source.path.name in _STRICT else parsed.comments[:1]:
        source.say("json.comment", line)
    for line in parsed.commas:
        source.say("json.comma", line)
    for line, key in parsed.twice:
        source.say("file.twice", line, key=key)
    keys = set(source.value) if isinstance(source.value, dict) else set()
    if ".claude" in source.path.parts or {"env", "permissions", "apiKeyHelper", "hooks"} & keys:
        source.kind = "Claude Code settings"
        claude_code.check_settings(source)
    elif {"auth_mode", "tokens", "last_refresh", "OPENAI_API_KEY"} & keys:
        source.kind = "Codex auth.json"
        codex.check_auth_file(source)
    else:
        source.kind = "JSON with a base URL"
        plain_files.check_generic(source)


def _read_toml(source: Source) -> None:
    try:
        source.value = tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        digits = str(error).partition("line ")[2].partition(",")[0]
        source.say("toml.broken", int(digits) if digits.isdigit() else None, problem=str(error))
        return
    source.where = toml_lines(source.text)
    source.kind = "Codex config.toml"
    codex.check_config(source)
