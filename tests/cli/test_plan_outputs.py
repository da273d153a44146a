"""`anaphora plan` with --emit, --log and --attach, against files and real servers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from anaphora.cli.main import cli
from anaphora.cli.plan_outputs import read_endpoint
from anaphora.engine.loop import EngineLoop
from anaphora.errors import ConfigError, EndpointRefused, EndpointUnreachable
from anaphora.server.auth import hash_keys
from anaphora.server.settings import ServerSettings, ServerState
from support.engines import make_engine
from support.models import tiny_llama
from support.servers import Served, running
from support.start_logs import start_log

QWEN = ("plan", "Qwen/Qwen2.5-7B-Instruct", "--hardware", "rtx-4090", "--dtype", "float16")


def run(*args: str, stdin: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(cli, args, input=stdin, catch_exceptions=False)
    return result.exit_code, result.stdout


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Served]:
    loop = EngineLoop(make_engine(tiny, max_model_len=256, num_blocks=128, max_num_seqs=4))
    loop.start()
    settings = ServerSettings(("tiny",), hash_keys(("secret",)))
    with running(ServerState(settings, loop)) as served:
        yield served


def test_emit_implies_its_engine_and_says_by_its_exit_code_whether_the_wish_fits() -> None:
    asked = (*QWEN, "--emit", "vllm-yaml", "--utilization", "0.9", "--kv-offloading-size", "8")
    code, text = run(*asked, "--context", "32768", "--concurrency", "16")
    assert code == 1
    assert yaml.safe_load(text)["kv-offloading-size"] == 8
    code, text = run(*asked, "--context", "4096", "--concurrency", "4")
    assert code == 0
    assert "CORRECTED" not in text


@pytest.mark.parametrize("size", ["nan", "inf"])
def test_a_size_that_is_no_size(size: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-offloading-size is {size}"):
        run(*QWEN, "--context", "4096", "--emit", "vllm-yaml", "--kv-offloading-size", size)


@pytest.mark.parametrize("drawn", [("--grid",), ("--html", "grid.html")])
def test_the_heat_map_is_not_left_out_silently(drawn: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--grid and --html draw the plan itself"):
        run(*QWEN, "--context", "4096", "--emit", "vllm-yaml", *drawn)


@pytest.mark.parametrize(
    ("target", "variable"),
    [
        ("vllm-yaml", "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve --config"),
        ("vllm-cli", "\nVLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve"),
        ("compose", "VLLM_ALLOW_LONG_MAX_MODEL_LEN: '1'"),
        ("sglang", "\nSGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 sglang serve"),
    ],
)
def test_a_context_beyond_the_limit_brings_the_variable_that_allows_it(target: str, variable: str) -> None:
    _, text = run(*QWEN, "--context", "40960", "--allow-long", "--emit", target)
    assert variable in text
    _, text = run(*QWEN, "--context", "32768", "--emit", target)
    assert "ALLOW" not in text


def test_a_log_of_an_engine_told_to_go_beyond_the_limit_is_read() -> None:
    log = (
        "INFO vLLM API server version 0.11.0\n"
        "ValueError: To serve at least one request with the models's max seq len (131072), (7.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (5.51 GiB). Based on the available "
        "memory, the estimated maximum model length is 103168. "
        "Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
        "initializing the engine.\n"
    )
    _, text = run(*QWEN, "--log", "-", stdin=log)
    assert "it has 103,168" in text


def test_emit_as_json() -> None:
    code, text = run(*QWEN, "--context", "32768", "--concurrency", "16", "--emit", "sglang", "--json")
    found = json.loads(text)
    assert code == 1
    assert (found["schema_version"], found["emit"]["target"], len(found["emit"]["corrections"])) == (1, "sglang", 1)
    assert found["emit"]["text"].endswith("--enable-metrics\n")


def test_our_own_server_takes_what_is_emitted_for_it(tiny: Path, tmp_path: Path) -> None:
    asked = ("--context", "256", "--concurrency", "3", "--engine", "anaphora", "--utilization", "0.1")
    code, text = run("plan", str(tiny), *asked, "--emit", "anaphora")
    assert code == 0
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    code, shown = run("serve", str(tiny), "--config", str(file), "--print-config")
    assert code == 0
    wanted, config = yaml.safe_load(text), json.loads(shown)
    assert config["num_blocks"] * config["block_bytes"] == wanted["kv-memory"]
    assert (config["max_num_seqs"], config["max_model_len"]) == (3, wanted["max-model-len"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--emit", "tgi"), "choose one of vllm-yaml"),
        (("--emit", "sglang", "--engine", "vllm"), "give --engine sglang"),
        (("--emit", "vllm-cli", "--log", "x"), "exclude each other"),
        (("--kv-offloading-size", "8"), "add --emit"),
        (("--log", "/nowhere/vllm.log"), "give the file"),
    ],
)
def test_wrong_options_say_what_to_do(options: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(*QWEN, "--context", "4096", *options)


def test_a_log_fills_in_what_was_left_open(tmp_path: Path) -> None:
    log = tmp_path / "vllm.txt"
    log.write_text(start_log("vllm_now"))
    code, text = run(*QWEN, "--log", str(log))
    assert code == 0
    assert "it has 129,184" in text
    assert "inside the interval" in text
    assert "\n setting " not in text
    _, same = run(*QWEN, "--log", "-", stdin=start_log("vllm_now"))
    assert same.replace("stdin", str(log)).split() == text.split()


def test_a_log_as_json() -> None:
    code, text = run(*QWEN, "--log", "-", "--json", "--utilization", "0.8", stdin=start_log("vllm_now"))
    found: dict[str, Any] = json.loads(text)
    assert code == 0
    assert found["report"]["engine"] == "vllm"
    assert sum(item["tokens"] for item in found["differences"]) == found["reported_tokens"] - found["predicted_tokens"]
    assert "setting gpu_memory_utilization" in {item["cause"] for item in found["differences"]}


def test_a_running_anaphora_is_read_to_the_block(tiny: Path, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # must not be asked for a local address
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    report = read_endpoint(server.url, "secret")
    assert (report.engine, report.num_blocks, report.block_size) == ("anaphora", 128, 16)
    code, text = run(
        "plan", str(tiny), "--dtype", "float32", "--attach", f"{server.url}/v1", "--api-key", "secret", "--json"
    )
    found = json.loads(text)
    assert found["reported_tokens"] == 128 * 16
    assert sum(item["tokens"] for item in found["differences"]) == found["reported_tokens"] - found["predicted_tokens"]
    assert "memory free at the start, or --kv-memory" in {item["cause"] for item in found["differences"]}
    assert code == 1  # its pool was set by hand, far below what the plan would give it


class _Locked(BaseHTTPRequestHandler):
    """A gateway that wants a key for everything."""

    def do_GET(self) -> None:
        body = b'{"error": {"message": "invalid API key"}}'
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_wants_a_key_says_so() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Locked) as locked:
        thread = threading.Thread(target=locked.serve_forever)
        thread.start()
        try:
            with pytest.raises(EndpointRefused, match="401") as caught:
                read_endpoint(f"http://127.0.0.1:{locked.server_port}", "wrong")
        finally:
            locked.shutdown()
            thread.join()
    assert caught.value.exit_code == 3
    assert "wrong" not in str(caught.value)


def test_nothing_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EndpointUnreachable, match="start the server"):
        read_endpoint(f"http://127.0.0.1:{port}")


def test_the_bytes_of_a_request_are_those_of_the_length_beside_them() -> None:
    """max_model_len is 1.2 x the wish here; the figure is of the wish."""
    _, text = run(*QWEN, "--context", "8192", "--kv-dtype", "fp8", "--emit", "vllm-cli")
    assert "--max-model-len 9984" in text
    assert "224 MiB for one request of 8,192 tokens" in text
