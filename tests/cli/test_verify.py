"""`anaphora verify`: exit codes, pure JSON, the page, Ctrl-C, and secrets that stay secret."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from anaphora.cli.verify import verify
from anaphora.errors import ConfigError, EndpointRefused, EndpointUnreachable
from support.fake_server import Fake, serving

KEY = "sk-very-secret-key-0123"


def run(*args: str) -> Result:
    return CliRunner().invoke(verify, args, catch_exceptions=False)


def test_people_json_and_page_tell_the_same_and_no_secret(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    fake = Fake(granularity=128, api_key=KEY)
    with serving(fake) as url:
        told = run(f"{url}/v1/", "--api-key", KEY, "--prefix-tokens", "1000", "--html", str(page))
        machine = run(url, "--api-key", KEY, "--prefix-tokens", "1000", "--header", f"X-Token: {KEY}", "--json")
    assert told.exit_code == machine.exit_code == 0
    assert "Prefix caching works." in told.stdout
    assert "Prefixes under 128 tokens are never reused" in told.stdout
    assert "rounds of cold, warm and control" in told.stderr
    report = json.loads(machine.stdout)
    assert report["schema_version"] == 1
    assert report["command"] == "verify"
    assert report["verdict"]["answer"] == "works"
    assert report["engine"]["name"] == "vllm"
    assert report["granularity"]["step"] == 128
    assert report["interrupted"] is False
    assert len(report["trials"]) == 3 * report["verdict"]["rounds"]
    html = page.read_text()
    assert "Prefix caching works." in html
    assert html.count("<svg") == 2
    for text in (told.output, machine.output, html):
        assert "very-secret" not in text
    assert all(body["max_tokens"] <= 24 for body in fake.requests)


def test_a_seed_makes_the_same_prompts_and_none_makes_new_ones() -> None:
    def prompts(*args: str) -> list[str]:
        fake = Fake(granularity=1, seconds_per_token=2e-5)
        with serving(fake) as url:
            run(url, "--prefix-tokens", "300", *args)
        return [body["messages"][0]["content"] for body in fake.requests[:8]]

    assert prompts("--seed", "5") == prompts("--seed", "5")
    assert not set(prompts()) & set(prompts())


def test_failures_are_typed_and_what_cannot_be_told_is_exit_3() -> None:
    with pytest.raises(ConfigError, match="http"):
        run("ftp://host")
    with pytest.raises(EndpointUnreachable, match="Nothing listens"):
        run("http://127.0.0.1:9")
    with serving(Fake(api_key=KEY)) as url, pytest.raises(EndpointRefused, match="ANAPHORA_API_KEY"):
        run(url)
    with serving(Fake(models=("a", "b"))) as url, pytest.raises(ConfigError, match="--model: a, b"):
        run(url)


def test_own_prompts(tmp_path: Path) -> None:
    path, page = tmp_path / "prompts.txt", tmp_path / "report.html"
    rules = "all the rules of the house in full " * 20
    path.write_text(f"Request 1 of today: {rules}\nRequest 2 of today: {rules}\n")
    with serving(Fake()) as url:
        told = run(url, "--prompts", str(path), "--html", str(page))
        machine = run(url, "--prompts", str(path), "--json")
    assert told.exit_code == 1
    assert "parts from prompt 1: a number that counts up" in told.stdout
    assert "[2]" in told.stdout
    assert "Fix: " in told.stdout
    assert "<mark>2</mark>" in page.read_text()
    report = json.loads(machine.stdout)
    assert report["command"] == "verify --prompts"
    assert len(report["prompts"]) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_reports_what_was_measured() -> None:
    fake = Fake(seconds_per_token=1e-4)
    with serving(fake) as url:
        # a process started in the background of a shell is born ignoring SIGINT
        code = "import signal; signal.signal(2, signal.default_int_handler); from anaphora.cli.main import main; main()"
        command = [sys.executable, "-c", code, "verify", url, "--prefix-tokens", "1000", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            end = time.monotonic() + 60
            while len(fake.requests) < 8:
                assert time.monotonic() < end
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    report = json.loads(out)
    assert report["interrupted"] is True
    assert report["trials"]
    assert report["verdict"]["answer"] == "cannot tell"
    assert b"Traceback" not in err
