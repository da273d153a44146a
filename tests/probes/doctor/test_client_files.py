"""Claude Code, Codex, .env and other clients' files: by line, with the edit, and never a secret."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from anaphora.probes.doctor.files import lint
from anaphora.probes.doctor.finding import Diagnosis
from anaphora.probes.doctor.fixing import apply, fix
from anaphora.probes.doctor.report import Report
from anaphora.probes.doctor.source import Source
from support.diagnoses import KEY, token_that_ended


def check(path: Path, text: str) -> Source:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)
    source = lint(path)
    diagnosis = Diagnosis(loose=source.findings, notes=source.notes)
    report = Report(diagnosis, secrets=source.secrets)
    assert KEY not in report.as_text() + report.as_json() + report.as_html()
    return source


def codes(source: Source) -> list[str]:
    return sorted(finding.code for finding in source.findings)


def claude(tmp_path: Path, **env: object) -> Source:
    return check(tmp_path / ".claude" / "settings.json", json.dumps({"env": env}, indent=2))


SOUND = {
    "ANTHROPIC_BASE_URL": "http://127.0.0.1:8000",
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "qwen",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
}


def test_sound_settings_have_no_finding(tmp_path: Path) -> None:
    assert codes(claude(tmp_path, **SOUND)) == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"ANTHROPIC_BASE_URL": "http://127.0.0.1:8000/v1"}, "base.anthropic"),
        ({"ANTHROPIC_BASE_URL": "http://127.0.0.1:8000/v1/messages"}, "base.anthropic"),
        ({"ANTHROPIC_BASE_URL": "127.0.0.1:8000"}, "base.anthropic"),
        ({"ANTHROPIC_API_KEY": "none"}, "claude.both-keys"),
        ({"ANTHROPIC_AUTH_TOKEN": ""}, "claude.no-key"),
        ({"ANTHROPIC_AUTH_TOKEN": f"Bearer {KEY}"}, "key.text"),
        ({"ANTHROPIC_DEFAULT_HAIKU_MODEL": ""}, "claude.haiku"),
        ({"CLAUDE_CODE_ATTRIBUTION_HEADER": "1"}, "claude.attribution"),
        ({"CLAUDE_CODE_MAX_OUTPUT_TOKENS": 8000}, "claude.not-text"),
        ({"ANTHROPIC_API_BASE": "http://x"}, "claude.name"),
        ({"HTTP_PROXY": "http://10.0.0.9:3128"}, "claude.proxy"),
        ({"ANTHROPIC_BASE_URL": "https://api.openai.com"}, "claude.openai-only"),
    ],
)
def test_one_thing_wrong_in_claude_codes_settings(tmp_path: Path, change: dict[str, object], code: str) -> None:
    source = claude(tmp_path, **{**SOUND, **change})
    assert codes(source) == [code]
    assert source.findings[0].line is not None


def test_settings_with_comments_and_what_stands_outside_of_env(tmp_path: Path) -> None:
    text = '{\n  // mine\n  "ANTHROPIC_BASE_URL": "http://127.0.0.1:8000",\n  "env": {"A": "1",},\n  "env": {}\n}\n'
    source = check(tmp_path / ".claude" / "settings.json", text)
    assert [(f.code, f.line) for f in source.findings] == [
        ("json.comment", 2), ("claude.top-level", 3), ("json.comma", 4), ("file.twice", 5)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line"), [('{\n "env": {\n  "A": 1\n  "B": 2}}', 4), ("{", 1), ('{"a": tru}', 1), ("", 1)]
)
def test_broken_json_is_named_by_its_line(tmp_path: Path, text: str, line: int) -> None:
    source = check(tmp_path / "settings.json", text)
    assert [(f.code, f.line) for f in source.findings] == [("json.broken", line)]


CODEX = """\
model = "qwen"
model_provider = "local"

[model_providers.local]
name = "local"
base_url = "http://127.0.0.1:8000/v1"
env_key = "LOCAL_KEY"
wire_api = "responses"
"""


@pytest.mark.parametrize(
    ("old", "new", "code", "line"),
    [
        ("", "", "", 0),
        ("8000/v1", "8000", "base.openai", 6),
        ("8000/v1", "8000/v1/responses", "base.openai", 6),
        ('"responses"', '"chat"', "codex.wire-api", 8),
        ('env_key = "LOCAL_KEY"', f'env_key = "{KEY}"', "codex.env-key", 7),
        ('env_key = "LOCAL_KEY"', f'api_key = "{KEY}"', "codex.api-key", 7),
        ("env_key", "env_keys", "codex.key", 7),
        ('provider = "local"', 'provider = "locl"', "codex.provider", 2),
        ('model = "qwen"', 'model = "qwen"\nprofile = "p"', "codex.profile", 2),
        ('model = "qwen"', 'model = "qwen"\napproval_policy = "untrusted"', "codex.approval", 2),
        ('model = "qwen"\n', "", "codex.no-model", 1),
        ("local", "ollama", "codex.reserved", 4),
        ('wire_api = "responses"', 'wire_api = "responses"\nsandbox_mode = "read-only"', "codex.swallowed", 9),
        ('wire_api = "responses"', 'wire_api = "responses"\nauth = {command = "x"}', "codex.auth-twice", 9),
    ],
)
def test_one_thing_wrong_in_codexs_config(tmp_path: Path, old: str, new: str, code: str, line: int) -> None:
    source = check(tmp_path / "config.toml", CODEX.replace(old, new))
    assert [(f.code, f.line) for f in source.findings] == ([(code, line)] if code else [])


def test_broken_toml(tmp_path: Path) -> None:
    source = check(tmp_path / "config.toml", 'model = "a"\nmodel_provider = \n')
    assert [(f.code, f.line) for f in source.findings] == [("toml.broken", 2)]


def test_codexs_auth_file(tmp_path: Path) -> None:
    path = tmp_path / "auth.json"
    assert codes(check(path, json.dumps({"auth_mode": "apikey", "OPENAI_API_KEY": KEY}))) == []
    assert codes(check(path, json.dumps({"OPENAI_API_KEY": None, "tokens": None}))) == ["codex.logged-out"]
    assert codes(check(path, json.dumps({"auth_mode": "apikey", "tokens": {"access_token": KEY}}))) == ["codex.mode"]
    ended = {"access_token": token_that_ended()}
    assert codes(check(path, json.dumps({"auth_mode": "chatgpt", "tokens": ended}))) == ["key.expired"]
    renewed = check(path, json.dumps({"auth_mode": "chatgpt", "tokens": {**ended, "refresh_token": KEY}}))
    assert codes(renewed) == []
    assert "codex login" in renewed.notes[0]
    path.chmod(0o644)
    assert codes(lint(path)) == ["key.readable"]


def test_variables(tmp_path: Path) -> None:
    text = f"""\
# a comment
OPENAI_API_BASE = http://127.0.0.1:8000
export OPENAI_API_KEY="{KEY}
HTTPS_PROXY=http://10.0.0.9:3128
what is this
OLLAMA_NUM_CTX=32768
"""
    source = check(tmp_path / ".env", text)
    assert [(f.code, f.line) for f in source.findings] == [
        ("env.spaces", 2), ("env.outdated", 2), ("base.openai", 2), ("env.quote", 3), ("key.text", 3), ("env.line", 5),
        ("env.outdated", 6),
    ]  # fmt: skip
    assert (
        codes(check(tmp_path / "good.env", f"OPENAI_BASE_URL=http://127.0.0.1:8000/v1\nOPENAI_API_KEY={KEY}\n")) == []
    )


def test_a_generic_file(tmp_path: Path) -> None:
    good = {"api_base": "http://127.0.0.1:8000/v1", "api_key": KEY, "model": "qwen"}
    assert codes(check(tmp_path / "client.json", json.dumps(good))) == []
    bad = {"api_base": "http://127.0.0.1:8000", "api_key": "your-api-key", "model": ""}
    assert codes(check(tmp_path / "client.json", json.dumps(bad))) == [
        "base.openai",
        "generic.empty",
        "key.placeholder",
    ]


def test_keys_that_git_keeps_or_would_take(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    git("init")
    text = f"OPENAI_BASE_URL=http://127.0.0.1:8000/v1\nOPENAI_API_KEY={KEY}\n"
    assert codes(check(tmp_path / ".env", text)) == ["key.not-ignored"]
    git("add", ".env")
    assert codes(check(tmp_path / ".env", text)) == ["key.committed"]
    git("rm", "--cached", ".env")
    (tmp_path / ".gitignore").write_text(".env\n")
    assert codes(check(tmp_path / ".env", text)) == []


def test_fix_writes_the_safe_edits_only_and_keeps_the_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.sh"
    text = "exec vllm serve m \\\n  --swap-space 8 \\\n  --max-model-len 8192 \\\n  --disable-log-requests\n"
    source = check(path, text)
    count, backup = fix(source)
    assert count == 1
    assert backup == tmp_path / "serve.sh.bak"
    assert backup.read_text() == text
    assert path.read_text() == "exec vllm serve m \\\n  --swap-space 8 \\\n  --max-model-len 8192\n"
    assert path.stat().st_mode & 0o777 == 0o600
    again = lint(path)
    assert codes(again) == ["option.removed"]
    assert fix(again) == (0, None)


def test_fixed_settings_are_sound(tmp_path: Path) -> None:
    source = claude(tmp_path, **{**SOUND, "ANTHROPIC_BASE_URL": "http://127.0.0.1:8000/v1/", "CLAUDE_CODE_X": 5})
    assert len(source.findings) == 2
    assert fix(source)[0] == 2
    assert codes(lint(source.path)) == []
    assert apply("a\nb", []) == "a\nb"
