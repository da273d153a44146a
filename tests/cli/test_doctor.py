"""`anaphora doctor`: targets, outputs, exit codes; no secret in any byte of what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from anaphora.cli.main import cli
from anaphora.errors import ConfigError
from support import broken_servers as broken
from support.fake_server import Fake, serving

KEY = "sk-Zx81secretsecret9Q"
QUICK = ("--context-words", "0")


def doctor(*arguments: str, text: str = "", env: dict[str, str] | None = None) -> Result:
    variables = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"), "")
    result = CliRunner().invoke(cli, ["doctor", *arguments], input=text, env={**variables, **(env or {})})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_healthy_endpoint() -> None:
    with serving() as url:
        result = doctor(url, *QUICK)
    assert result.exit_code == 0
    assert result.stdout.rstrip().splitlines()[-1] == f"Nothing is wrong: {url}."


def test_a_refused_key_ends_with_whose_side_and_what_to_do() -> None:
    with serving(Fake(api_key="sk-the-right-one-is-this")) as url:
        result = doctor(url, "--api-key", KEY, *QUICK)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("It is your side: The server does not know this key. Do this: ")
    assert KEY not in result.output


def test_an_unreachable_endpoint_exits_3_and_usage_2(tmp_path: Path) -> None:
    with broken.raw(broken.silent) as address:
        pass
    assert doctor(f"http://{address}").exit_code == 3
    with pytest.raises(ConfigError, match="one URL"):
        doctor("http://a", "http://b")
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        doctor(str(tmp_path / "absent.yaml"))
    with pytest.raises(ConfigError, match=r"absent\.log"):
        doctor("--log", str(tmp_path / "absent.log"))


def test_json_has_a_schema_and_nothing_else_is_on_stdout(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    with serving(Fake(cached_tokens="missing")) as url:
        result = doctor(url, "--json", "--html", str(page), "--header", f"x-extra-token: {KEY}", *QUICK)
    found = json.loads(result.stdout)
    assert found["schema_version"] == 1
    assert found["exit_code"] == result.exit_code == 1
    assert [finding["code"] for finding in found["findings"]] == ["usage.cached"]
    assert found["engine"]["name"] == "vllm"
    assert {step["name"] for step in found["steps"]} >= {"url", "auth", "cache", "routes"}
    html = page.read_text()
    assert html.startswith("<!doctype html>")
    assert "--enable-prompt-tokens-details" in html
    assert KEY not in html + result.output


def test_a_log_from_stdin_and_from_a_file(tmp_path: Path) -> None:
    text = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    assert "log.sglang-memory" in doctor("--json", text=text).stdout
    (tmp_path / "server.log").write_text(text)
    result = doctor("--log", str(tmp_path / "server.log"))
    assert result.exit_code == 1
    assert "no memory left for KV" in result.stdout
    assert doctor(text="all is well\n").exit_code == 0


def test_memory_of_a_device_against_a_start(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("vllm serve Qwen/Qwen2.5-7B-Instruct --max-model-len 32768 --max-num-seqs 16\n")
    assert doctor(str(path)).exit_code == 0
    assert "30,064,771,072 bytes" in doctor(str(path)).stdout
    result = doctor(str(path), "--gpu", "rtx-4090", "--json")
    found = json.loads(result.stdout)["findings"]
    assert [finding["code"] for finding in found] == ["memory.all"]
    assert "28.00 GiB" in found[0]["what"]
    path.write_text("vllm serve Qwen/Qwen2.5-72B-Instruct --max-model-len 32768\n")
    found = json.loads(doctor(str(path), "--gpu", "rtx-4090", "--json").stdout)["findings"]
    assert [finding["code"] for finding in found] == ["memory.weights"]
    path.write_text("vllm serve Qwen/Qwen2.5-7B-Instruct --max-model-len 32768 --gpu-memory-utilization 0.67\n")
    found = json.loads(doctor(str(path), "--gpu", "rtx-4090", "--json").stdout)["findings"]
    assert [finding["code"] for finding in found] == ["memory.one"]


def test_nothing_is_written_without_fix(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("vllm serve m --disable-log-requests --max-model-len 8192\n")
    assert doctor(str(path)).exit_code == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run.sh"]
    assert "1 edits written" in doctor(str(path), "--fix").stdout
    assert path.read_text() == "vllm serve m  --max-model-len 8192\n"
    assert (tmp_path / "run.sh.bak").exists()


def test_no_secret_is_in_any_byte_of_a_bundle(tmp_path: Path) -> None:
    secrets = [KEY, "hunter2hunter2", "plain-token-without-a-form", "0123456789abcdef0123"]
    settings = tmp_path / ".claude" / "settings.json"
    settings.parent.mkdir()
    settings.write_text(
        json.dumps({"env": {"ANTHROPIC_AUTH_TOKEN": secrets[2], "ANTHROPIC_BASE_URL": "http://127.0.0.1:1"}})
    )
    variables = tmp_path / ".env"
    variables.write_text(f"OPENAI_API_KEY='{secrets[3]}'\nDB=postgres://me:{secrets[1]}@db/x\n")
    log = tmp_path / "server.log"
    log.write_text(f"api_key={secrets[2]}\nAuthorization: Bearer {KEY}\nrefused {secrets[3]}\n")
    bundle = tmp_path / "bundle.zip"
    given = [str(settings), str(variables), "--log", str(log), "--bundle", str(bundle), "--api-key", KEY]
    with serving(Fake(api_key="sk-the-right-one-is-this")) as url:
        result = doctor(url, *given, *QUICK, env={"HTTP_PROXY": f"http://me:{secrets[1]}@proxy:3128"})
    assert result.exit_code == 1
    with zipfile.ZipFile(bundle) as archive:
        entries: dict[str, Any] = {name: archive.read(name) for name in archive.namelist()}
    assert {"report.txt", "report.json", "machine.json", "files/1-settings.json", "logs/1-server.log"} <= set(entries)
    assert json.loads(entries["machine.json"])["proxy_variables"] == ["HTTP_PROXY"]
    everything = b"\n".join([bundle.read_bytes(), *entries.values(), *(name.encode() for name in entries)])
    for secret in secrets:
        assert secret.encode() not in everything
        assert secret not in result.output


def test_help_imports_neither_torch_nor_httpx() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from anaphora.cli.main import cli;"
        "assert CliRunner().invoke(cli, ['doctor', '--help']).exit_code == 0;"
        "print(sorted({'torch', 'httpx', 'rich', 'yaml', 'asyncio'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
