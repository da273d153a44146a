"""Loading, draining, failing, and what signals do to the process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from anaphora.engine.loop import EngineLoop
from anaphora.errors import ConfigError, CorruptModel
from anaphora.server.run import bind
from anaphora.server.settings import ServerSettings, ServerState
from support.servers import Served, running

SETTINGS = ServerSettings(("tiny",))
LONG = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True}
ENDLESS = {**LONG, "max_tokens": 4000}
SHORT = {"prompt": "Once", "max_tokens": 2}
PROCESS = """
import sys, time
from pathlib import Path
from anaphora.server.run import run_server
from anaphora.server.settings import ServerSettings, ServerState

def load():
    if sys.argv[1] == "never":
        time.sleep(600)
    from support.engines import make_engine
    from anaphora.engine.loop import EngineLoop
    loop = EngineLoop(make_engine(Path(sys.argv[1]), max_model_len=4096, num_blocks=300))
    loop.start()
    return loop

run_server(ServerState(ServerSettings(("tiny",))), port=0, load=load, on_listening=lambda url: print(url, flush=True))
print("ended", flush=True)
"""


@pytest.fixture
def long_loop(tiny_loop: Callable[..., EngineLoop]) -> EngineLoop:
    return tiny_loop(max_model_len=4096, num_blocks=300)


def lines_of(reply: httpx.Response) -> Iterator[str]:
    return (line for line in reply.iter_lines() if line)


def test_health_says_loading_and_then_ok(tiny_loop: Callable[..., EngineLoop]) -> None:
    go_on = threading.Event()

    def load() -> EngineLoop:
        assert go_on.wait(30)
        return tiny_loop()

    with running(ServerState(SETTINGS), load=load) as served, served.client() as client:
        reply = client.get("/health")
        assert (reply.status_code, reply.json()["status"]) == (503, "loading")
        assert int(reply.headers["retry-after"]) > 0
        for refused in (client.post("/v1/completions", json=SHORT), client.get("/v1/models")):
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert "loading" in refused.json()["error"]["message"]
        assert client.get("/version").status_code == 200
        assert "anaphora_requests_running" not in served.metrics()
        go_on.set()
        while client.get("/health").status_code != 200:
            time.sleep(0.02)
        assert client.get("/health").json() == {"status": "ok"}
        assert client.post("/v1/completions", json=SHORT).status_code == 200


def test_a_load_that_fails_ends_the_server_with_its_error() -> None:
    def load() -> EngineLoop:
        raise CorruptModel("model.safetensors is cut short")

    state = ServerState(SETTINGS)
    with pytest.raises(CorruptModel, match="cut short"), running(state, load=load) as served:
        served.thread.join(30)
    assert state.failure == "model.safetensors is cut short"


def test_draining_finishes_what_runs_and_refuses_the_rest(long_loop: EngineLoop) -> None:
    with running(ServerState(SETTINGS, long_loop), shutdown_timeout=60) as served, served.client() as client:
        with client.stream("POST", "/v1/completions", json=LONG) as reply:
            lines = lines_of(reply)
            next(lines)
            served.stop()
            with served.client() as other:
                while (health := other.get("/health")).status_code == 200:
                    time.sleep(0.01)
                assert health.json()["status"] == "draining"
                refused = other.post("/v1/completions", json=SHORT)
                assert refused.status_code == 503
                assert "shutting down" in refused.json()["error"]["message"]
            assert list(lines)[-1] == "data: [DONE]"
        served.thread.join(30)
        assert not served.thread.is_alive()
        with pytest.raises(httpx.ConnectError):
            client.get("/health")


def test_at_the_limit_what_still_runs_is_told_so(long_loop: EngineLoop) -> None:
    whole: list[httpx.Response] = []
    with running(ServerState(SETTINGS, long_loop), shutdown_timeout=0.2) as served, served.client() as client:

        def wait_for_a_whole_answer() -> None:
            with served.client() as other:
                whole.append(other.post("/v1/completions", json={**ENDLESS, "stream": False}))

        waiting = threading.Thread(target=wait_for_a_whole_answer)
        with client.stream("POST", "/v1/completions", json=ENDLESS) as reply:
            lines = lines_of(reply)
            next(lines)
            waiting.start()
            served.wait_for(lambda samples: samples["anaphora_requests_running"] == 2)
            served.stop()
            last = list(lines)[-1]
        waiting.join(30)
    assert last.startswith('data: {"error":')
    assert "shut down" in last
    assert whole[0].status_code == 503
    assert long_loop.stats.blocks_active == 0


def test_an_engine_that_dies_is_reported_to_everyone(
    serve_tiny: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve_tiny()
    assert served.state.engine is not None

    def step() -> None:
        raise OSError("the memory is gone")

    def abort(request_id: str) -> bool:
        raise OSError("nor can anything be given back")

    monkeypatch.setattr(served.state.engine._engine, "step", step)
    monkeypatch.setattr(served.state.engine._engine, "abort", abort)
    with served.client() as client:
        assert client.post("/v1/completions", json=SHORT).status_code == 500
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "the memory is gone" in health.json()["reason"]
        refused = client.post("/v1/completions", json=SHORT)
        assert refused.status_code == 503
        assert "Restart the server" in refused.json()["error"]["message"]


def test_an_address_that_cannot_be_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="another --port"):
        bind("127.0.0.1", taken.getsockname()[1])
    for host, port, words in (("127.0.0.1", 99_999, "no port 99999"), ("no.such.host.invalid", 0, "Cannot listen")):
        with pytest.raises(ConfigError, match=words):
            bind(host, port)
    with bind("::1", 0) as sock:
        assert sock.family == socket.AF_INET6


class Process:
    """A server in a process of its own."""

    def __init__(self, model: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-c", PROCESS, model]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.popen.stdout is not None
        self.url = self.popen.stdout.readline().strip()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: Any) -> None:
        self.popen.kill()
        self.popen.communicate()


def test_sigterm_while_loading_ends_at_once_with_0() -> None:
    with Process("never") as process:
        assert httpx.get(f"{process.url}/health", trust_env=False).json()["status"] == "loading"
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(20) == 0


def test_sigterm_finishes_what_runs_and_exits_0_and_a_second_sigint_ends_at_once(tiny: Path) -> None:
    for number, body, code in ((signal.SIGTERM, LONG, 0), (signal.SIGINT, ENDLESS, -signal.SIGINT)):
        with Process(str(tiny)) as process, httpx.Client(base_url=process.url, trust_env=False, timeout=60) as client:
            while client.get("/health").status_code != 200:
                time.sleep(0.05)
            with client.stream("POST", "/v1/completions", json=body) as reply:
                lines = lines_of(reply)
                next(lines)
                process.popen.send_signal(number)
                while httpx.get(f"{process.url}/health", trust_env=False).status_code == 200:
                    time.sleep(0.01)
                process.popen.send_signal(number)
                if code == 0:
                    assert list(lines)[-1] == "data: [DONE]"
                else:
                    with pytest.raises(httpx.RemoteProtocolError):
                        list(lines)
            assert process.popen.wait(30) == code
