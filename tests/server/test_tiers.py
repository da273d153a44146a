"""Tiers under real servers: killed and started again, two that share a store, stores and disks that misbehave."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import LlamaConfig

from anaphora.engine.loop import EngineLoop
from anaphora.server.settings import ServerSettings, ServerState
from server.conftest import CHAT_TEMPLATE
from support.engines import make_engine
from support.models import save_byte_tokenizer, save_tiny_model
from support.remote import free_port, hangs, mooncake, pretended_valkey, valkey, why_no_mooncake
from support.servers import Served, running

LENGTH = 600
FULL = 592
"""Tokens of its whole blocks."""
PROMPT = random.Random(0).choices(range(256), k=LENGTH)
EXPLAIN = {"X-Anaphora-Explain": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, but enough of them that computing a prompt takes many times longer than loading it."""
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=256,
        tie_word_embeddings=True,
    )
    return save_byte_tokenizer(save_tiny_model(tmp_path_factory.mktemp("model"), config))


Serve = Callable[..., Served]


@pytest.fixture
def serve(model: Path) -> Iterator[Serve]:
    """Function: a server of its own; keywords go to the engine."""
    with ExitStack() as stack:

        def start(**settings: object) -> Served:
            loop = EngineLoop(make_engine(model, num_blocks=200, chat_template=CHAT_TEMPLATE, **settings))
            loop.start()
            return stack.enter_context(running(ServerState(ServerSettings(("model",)), loop)))

        yield start


def body(prompt: list[int] = PROMPT, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1} | more


def complete(url: str, **more: Any) -> dict[str, Any]:
    reply = httpx.post(f"{url}/v1/completions", json=body(**more), headers=EXPLAIN, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def tokens(answer: dict[str, Any]) -> list[str]:
    found: list[str] = answer["choices"][0]["logprobs"]["tokens"]
    return found


def stored(served: Served) -> dict[str, float]:
    """The metrics, once nothing waits to be stored or loaded."""

    def settled(samples: dict[str, float]) -> bool:
        waiting = [value for name, value in samples.items() if name.startswith("anaphora_tier_saves_waiting")]
        return not any(waiting) and samples["anaphora_kv_blocks{state=active}"] == 0

    return served.wait_for(settled, 30)


class Process:
    """`anaphora serve` in a process of its own."""

    def __init__(self, model: Path, *options: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-m", "anaphora", "serve", str(model), "--port", str(port), "--kv-memory", "32MiB"]
        command += ["--dtype", "float32", *options]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))

    def __enter__(self) -> Process:
        end = time.monotonic() + 90
        while time.monotonic() < end and self.popen.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        self.popen.kill()
        raise AssertionError(self.popen.communicate()[1])

    def __exit__(self, *_: Any) -> None:
        self.popen.kill()
        self.popen.communicate()

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)), 0.0)

    def wait_for(self, name: str, least: float) -> None:
        end = time.monotonic() + 30
        while self.metric(name) < least:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_kill_9_and_start_again_a_long_prefix_is_warm_from_disk(model: Path, tmp_path: Path) -> None:
    disk = ("--disk-cache", f"{tmp_path}:64MiB")
    with Process(model, *disk) as process:
        cold = complete(process.url)
        assert cold["explain"]["computed"]["tokens"] == LENGTH
        process.wait_for('anaphora_tier_saved_total{tier="disk"}', FULL // 16)
        process.popen.send_signal(signal.SIGKILL)
        process.popen.wait(20)
    with Process(model, *disk) as process:
        warm = complete(process.url)
        assert tokens(warm) == tokens(cold)
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == FULL
        assert warm["explain"]["disk"]["tokens"] == FULL
        assert warm["explain"]["disk"]["seconds"] > 0
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(30) == 0


def test_two_servers_reuse_what_the_other_computed(serve: Serve) -> None:
    other = random.Random(1).choices(range(256), k=LENGTH)
    with valkey() as store:
        tiers = {"remote_cache": f"valkey://127.0.0.1:{store.port}/0"}
        one, two = serve(**tiers), serve(**tiers)
        for prompt, first, second in ((PROMPT, one, two), (other, two, one)):
            cold = complete(first.url, prompt=prompt)
            stored(first)
            warm = complete(second.url, prompt=prompt)
            assert tokens(warm) == tokens(cold)
            assert warm["explain"]["remote"]["tokens"] == FULL, warm["explain"]
        assert stored(one)["anaphora_tier_corrupt_total{tier=remote}"] == 0


@pytest.mark.skipif(bool(why_no_mooncake()), reason=why_no_mooncake())
def test_two_processes_share_a_mooncake_store(model: Path, tmp_path: Path) -> None:
    """Both ways. A machine that is too busy to answer in time costs a hit, so there are several prompts."""
    with mooncake(tmp_path, 256 << 20) as store:
        option = ("--remote-cache", f"mooncake://{store.address}?timeout=10")
        with Process(model, *option) as one, Process(model, *option) as two:
            for first, second in ((one, two), (two, one)):
                reused = []
                for seed in range(4):
                    prompt = random.Random(f"{first.url} {seed}").choices(range(256), k=LENGTH)
                    before = first.metric('anaphora_tier_saved_total{tier="remote"}')
                    cold = complete(first.url, prompt=prompt)
                    assert cold["explain"]["computed"]["tokens"] == LENGTH
                    first.wait_for('anaphora_tier_saved_total{tier="remote"}', before + FULL // 16)
                    warm = complete(second.url, prompt=prompt)
                    assert tokens(warm) == tokens(cold)
                    reused.append(warm["explain"]["remote"]["tokens"])
                    if reused[-1] == FULL:
                        break
                assert reused[-1] == FULL, reused
            assert not any(each.metric('anaphora_tier_corrupt_total{tier="remote"}') for each in (one, two))


def test_the_explanation_and_the_metrics_say_the_same(serve: Serve) -> None:
    served = serve(ram_cache=8 << 20)
    first = complete(served.url)
    stored(served)
    with served.client() as client:
        assert client.post("/reset_prefix_cache").json() == {"reset": True}
        with client.stream("POST", "/v1/completions", json=body(stream=True), headers=EXPLAIN) as reply:
            lines = [line for line in reply.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert '"explain":{"pool":{"tokens":0,' in lines[-2]
        assert f'"ram":{{"tokens":{FULL},' in lines[-2]
        again = complete(served.url)
        assert (again["explain"]["pool"]["tokens"], tokens(again)) == (LENGTH - 1, tokens(first))
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "n": 2}
        answer = client.post("/v1/chat/completions", json=chat, headers=EXPLAIN).json()
        assert sum(part["tokens"] for part in answer["explain"].values()) == answer["usage"]["prompt_tokens"]
        assert "explain" not in client.post("/v1/chat/completions", json=chat).json()
        refused = client.post("/v1/chat/completions", json=chat, headers={"X-Anaphora-Explain": "yes"})
        assert refused.status_code == 400
    metrics = stored(served)
    assert metrics["anaphora_tier_hits_total{tier=ram}"] == FULL // 16
    assert metrics["anaphora_prompt_tokens_by_source_total{source=ram}"] == FULL
    assert metrics["anaphora_tier_decisions_total{decision=load}"] == 1
    assert metrics["anaphora_tier_up{tier=ram}"] == 1


def test_without_tiers_nothing_of_them_is_there(serve: Serve) -> None:
    served = serve()
    complete(served.url, prompt=PROMPT[:50])
    assert not [name for name in served.metrics() if name.startswith("anaphora_tier_")]


@pytest.mark.parametrize("command", [b"EXISTS", b"GET", b"SET"])
def test_a_remote_that_hangs_holds_nobody_up_for_long(serve: Serve, command: bytes) -> None:
    never = threading.Event()
    with pretended_valkey({command: hangs(never)} | ({b"EXISTS": b":1\r\n"} if command == b"GET" else {})) as address:
        expected = tokens(complete(serve().url))
        served = serve(remote_cache=f"valkey://{address}/0?timeout=1")
        began = time.monotonic()
        assert tokens(complete(served.url)) == expected
        assert time.monotonic() - began < 8
        never.set()


def test_a_remote_that_is_down(serve: Serve) -> None:
    served = serve(remote_cache=f"valkey://127.0.0.1:{free_port()}/0")
    assert complete(served.url)["explain"]["computed"]["tokens"] == LENGTH
    stored(served)
    assert complete(served.url)["explain"]["pool"]["tokens"] == LENGTH - 1


@contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """A file system of 2 MiB, all its own."""
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_and_the_server_goes_on(serve: Serve, tmp_path: Path) -> None:
    with full_disk(tmp_path):
        served = serve(disk_cache=f"{tmp_path}/kv:64MiB")
        first = complete(served.url)
        metrics = stored(served)
        assert metrics["anaphora_tier_save_failed_total{tier=disk}"] + metrics["anaphora_tier_dropped_total{tier=disk}"]
        assert tokens(complete(served.url)) == tokens(first)


def test_clients_that_leave_while_blocks_are_loaded(serve: Serve, tmp_path: Path) -> None:
    served = serve(disk_cache=f"{tmp_path}:64MiB")
    first = complete(served.url)
    stored(served)
    with served.client() as client:
        for _ in range(10):
            client.post("/reset_prefix_cache")
            with pytest.raises(httpx.TimeoutException):
                client.post("/v1/completions", json=body(max_tokens=400), timeout=0.02)
        stored(served)
        assert tokens(complete(served.url)) == tokens(first)
        assert client.post("/reset_prefix_cache").json() == {"reset": True}


def test_damaged_files_of_a_stopped_server(model: Path, tmp_path: Path) -> None:
    disk = ("--disk-cache", f"{tmp_path}:64MiB")
    with Process(model, *disk) as process:
        cold = complete(process.url)
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(30) == 0  # drained: all is stored
    for path in tmp_path.rglob("seg-*"):
        data = bytearray(path.read_bytes())
        for i in range(1 << 17, len(data), 997):  # behind the tables, so that the blocks are found
            data[i] ^= 1
        path.write_bytes(data)
    with Process(model, *disk) as process:
        again = complete(process.url)
        assert tokens(again) == tokens(cold)
        assert again["explain"]["computed"]["tokens"] > 100
        assert process.metric('anaphora_tier_corrupt_total{tier="disk"}') > 0
