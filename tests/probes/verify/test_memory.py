"""Memory of a process that listens here, read from /proc."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from anaphora.probes.verify.memory import Memory, MemoryStory, memory_of, server_pids

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")

CHILD = """
import socket, subprocess, sys
listener = socket.create_server(("127.0.0.1", 0))
worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(listener.getsockname()[1], worker.pid, flush=True)
input()
worker.stdin.close(); worker.wait()
"""


def test_the_listener_and_its_workers_are_found() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        port, worker = map(int, server.stdout.readline().split())
        pids = server_pids(port)
        memory = memory_of(pids)
        server.communicate(b"\n", timeout=20)
    assert pids == tuple(sorted((server.pid, worker)))
    assert memory is not None
    assert 2 << 20 < memory.rss < 1 << 30
    assert memory_of(pids) is None  # gone


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        assert os.getpid() in server_pids(port)
    assert server_pids(port) == ()


def test_growth_is_told_from_noise() -> None:
    def story(cold: int, warm: int, gpu: int | None = None) -> MemoryStory:
        return MemoryStory((1,), Memory(1 << 30, gpu), Memory(cold, gpu), Memory(warm, gpu and gpu + (64 << 20)))

    quiet = story((1 << 30) + (200 << 20), (1 << 30) + (201 << 20))
    assert not quiet.grew
    assert "no more memory (the first took 209,715,200 bytes (200.0 MiB) RSS)" in quiet.sentence
    grown = story(1 << 30, (1 << 30) + (100 << 20))
    assert grown.grew
    assert "104,857,600 bytes (100.0 MiB) RSS more" in grown.sentence
    assert "67,108,864 bytes (64.0 MiB) GPU memory" in story(1 << 30, 1 << 30, 1 << 33).sentence
