"""`anaphora explain`: of a real server and of the log that it wrote; exit codes, JSON, bad input, privacy."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from anaphora.cli.explain import explain
from anaphora.cli.replay import replay
from anaphora.errors import ConfigError, EndpointRefused, EndpointUnreachable, InputError, UnexpectedAnswer
from anaphora.replay.request_log import MARK, VERSION
from support.fake_server import Fake, serving
from support.models import tiny_llama

SECRET = "Zebra-Quartz"
RULES = f"You are a helpful assistant of {SECRET}. Be brief. "
KEY = "a-key-of-the-test"


def run(*args: str) -> Result:
    return CliRunner().invoke(explain, args, catch_exceptions=False)


class Deployed:
    """`anaphora serve`, as a process of its own, after a few requests."""

    def __init__(self, url: str, log: Path, ids: list[str]) -> None:
        self.url, self.log, self.ids = url, log, ids


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("serve")
    log = folder / "requests.jsonl"
    command = [
        sys.executable,
        "-m",
        "anaphora",
        "serve",
        str(tiny_llama(folder / "tiny", max_position=2048)),
        "--port=0",
    ]
    command += ["--device=cpu", "--dtype=float32", "--kv-memory=1MiB", "--max-model-len=512", "--explain-text"]
    command += [f"--request-log={log}", f"--api-key={KEY}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        url = next(found[1] for line in lines if (found := re.search(r"ready in .*(http://\S+)/v1", line)))
        ids = []
        with httpx.Client(
            base_url=url, trust_env=False, timeout=60, headers={"Authorization": f"Bearer {KEY}"}
        ) as client:
            for second in (3, 9, 9):
                prompt = f"{RULES}Now: 2026-11-29 10:15:0{second}. Hi"
                answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
                assert answer.status_code == 200, answer.text
                ids.append(answer.json()["id"])
        yield Deployed(url, log, ids)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        if process.stderr is not None:
            process.stderr.close()


def test_a_server_explains_itself(deployed: Deployed) -> None:
    told = run(deployed.url, "--api-key", KEY)
    assert told.exit_code == 1, told.output
    assert f"parts from {deployed.ids[0]}-0 at token {len(RULES) + 23}: a date or time" in told.stdout
    assert "the last token is always computed" in told.stdout
    assert "Put the time at the end of the prompt" in told.stdout
    assert "[2026-11-29 10:15:09]" in told.stdout  # --explain-text
    machine = run(deployed.url + "/v1", "--api-key", KEY, "--json", "--last", "2")
    facts = json.loads(machine.stdout)
    assert (facts["schema_version"], facts["command"], facts["num_requests"]) == (1, "explain", 2)
    assert [each["request_id"] for each in facts["requests"]] == [f"{name}-0" for name in deployed.ids[:0:-1]]
    assert [each["cause"] for each in facts["causes"]] == ["diverged", "below_granularity"]
    assert facts["requests"][1]["miss"]["difference"]["theirs"] == "2026-11-29 10:15:03"


def test_one_request_of_a_server(deployed: Deployed) -> None:
    told = run(deployed.url, "--api-key", KEY, "--id", deployed.ids[2])
    assert told.exit_code == 0
    assert "always computed" in told.stdout
    with pytest.raises(InputError, match="Remembered are the last") as unknown:
        run(deployed.url, "--api-key", KEY, "--id", "cmpl-else/../x")
    assert unknown.value.exit_code == 2


def test_its_log_tells_the_same_without_a_word_of_text(deployed: Deployed) -> None:
    machine = run(str(deployed.log), "--json")
    facts = json.loads(machine.stdout)
    assert machine.exit_code == 1
    live = json.loads(run(deployed.url, "--api-key", KEY, "--json").stdout)["requests"]
    for each in live:
        if each["miss"]["difference"] is not None:
            each["miss"]["difference"] |= dict.fromkeys(("before", "mine", "theirs", "after"))
    assert [each | {"time": 0} for each in facts["requests"]] == [each | {"time": 0} for each in live]
    assert "a date or time" in run(str(deployed.log), "--last", "2").stdout
    assert run(str(deployed.log), "--id", deployed.ids[2]).exit_code == 0
    raw = deployed.log.read_bytes() + (deployed.log.parent / "requests.jsonl.key").read_bytes()
    for word in (SECRET, "Zebra", "helpful", "10:15", KEY):
        assert word.encode() not in raw


def test_replay_reads_the_log_too(deployed: Deployed) -> None:
    result = CliRunner().invoke(replay, [str(deployed.log), "--json", "--jobs", "1"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert '"requests": 3' in result.stdout


HEAD = json.dumps({MARK: VERSION, "block_size": 16, "model": "m", "started": 1.0})
ROW = {
    "time": 5.0, "input_length": 20, "output_length": 2, "blocks": "AAAAAAAAAAA=", "hit": {"pool": 4}, "ttft": 0.1,
    "e2e": 0.2, "outcome": "stop", "request_id": "r-0", "miss": {"cause": "never_seen", "position": 4, "tokens": 16},
}  # fmt: skip


def log_of(path: Path, *rows: object) -> Path:
    path.write_text("\n".join([HEAD, *(row if isinstance(row, str) else json.dumps(row) for row in rows)]) + "\n")
    return path


@pytest.mark.parametrize(
    "wrong",
    [
        "{", "[]", "5",
        {**ROW, "input_length": "many"}, {**ROW, "input_length": -1}, {**ROW, "input_length": 1e300}, {**ROW, "hit": 3},
        {**ROW, "hit": {"pool": "x"}}, {**ROW, "miss": 7}, {**ROW, "miss": {}}, {**ROW, "miss": {"cause": "bad luck"}},
        {**ROW, "miss": {**ROW["miss"], "position": None}}, {**ROW, "miss": {**ROW["miss"], "difference": {"kind": 1}}},  # type: ignore[dict-item]
        {**ROW, "request_id": None}, {k: v for k, v in ROW.items() if k != "request_id"}, {MARK: 99},
    ],
)  # fmt: skip
def test_lines_that_cannot_be_used_are_said_and_left_out(tmp_path: Path, wrong: object) -> None:
    told = run(str(log_of(tmp_path / "log", wrong, ROW)))
    assert told.exit_code == 0
    assert "line 2: " in told.stderr
    assert "nobody went on like this after token 4" in told.stdout
    assert json.loads(run(str(tmp_path / "log"), "--json").stdout)["num_requests"] == 1


def test_strange_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    told = run(str(log_of(tmp_path / "log", {**ROW, "request_id": "\x1b[31m[bold]x"})))
    assert "\x1b" not in told.output
    assert "[bold]x" in told.output


def test_a_log_without_requests(tmp_path: Path) -> None:
    told = run(str(log_of(tmp_path / "log")))
    assert (told.exit_code, told.stdout) == (0, "No request yet.\n")


def test_what_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"timestamp": 1}\n')
    (tmp_path / "empty").touch()
    for name in ("x", "empty"):
        with pytest.raises(InputError, match="--request-log"):
            run(str(tmp_path / name))
    with pytest.raises(ConfigError, match="neither a file nor a URL"):
        run(str(tmp_path / "none"))
    with pytest.raises(InputError, match="holds no request"):
        run(str(log_of(tmp_path / "log", ROW)), "--id", "r2")
    assert run(str(tmp_path / "log"), "--id", "r").exit_code == 0


def test_servers_that_cannot_explain() -> None:
    with pytest.raises(EndpointUnreachable):
        run("http://127.0.0.1:9", "--timeout", "2")
    with serving(Fake(api_key=KEY)) as url:
        with pytest.raises(UnexpectedAnswer, match="not Anaphora's server"):
            run(url, "--api-key", KEY)
        with pytest.raises((EndpointRefused, UnexpectedAnswer)) as refused:
            run(url)
        assert refused.value.exit_code == 3
    assert run("http://127.0.0.1:9", "--last", "0").exit_code == 2
