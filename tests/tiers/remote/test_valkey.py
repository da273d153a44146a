"""ValkeyStore against real servers: alone, with users, over TLS and sockets, full, restarted, and as a cluster."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from anaphora.tiers.remote.chunks import manifest
from anaphora.tiers.remote.deadline import Deadline
from anaphora.tiers.remote.valkey import KEY_PREFIX, ValkeyStore, open_store
from anaphora.tiers.remote.valkey_url import parse
from anaphora.tiers.store import StoreError
from support.broken_servers import raw, self_signed
from support.remote import free_port, until, valkey, valkey_cluster, write

CHUNK = 10_000
PROMISE = manifest(3 * CHUNK, CHUNK)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with valkey() as running:
        yield running


@pytest.fixture
def store(server: Any) -> Iterator[ValkeyStore]:
    server.client().flushall()
    store = ValkeyStore(parse(f"valkey://127.0.0.1:{server.port}/1"), chunk_bytes=CHUNK)
    yield store
    store.close()


def key() -> bytes:
    return os.urandom(16)


def put(store: ValkeyStore, key: bytes, data: bytes) -> bool:
    return write(store, [key], [[memoryview(data)]])[0]


def get(store: ValkeyStore, key: bytes, size: int) -> bytes | int | None:
    """The value; its length where that is not `size`."""
    room = bytearray(size)
    length = store.read([key], [[memoryview(room)]])[0]
    return bytes(room) if length == size else length


def names(server: Any, db: int = 1) -> set[bytes]:
    return set(server.client(db=db).keys())


@pytest.mark.parametrize("size", [0, 1, 100, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 10 * CHUNK + 7, 1 << 20])
def test_what_is_written_is_read(store: ValkeyStore, size: int) -> None:
    name, data = key(), os.urandom(size)
    assert store.contains([name]) == [False]
    assert get(store, name, size) is None
    assert put(store, name, data)
    assert store.contains([key(), name]) == [False, True]
    assert get(store, name, size) == data


def test_values_are_gathered_and_scattered(store: ValkeyStore) -> None:
    name, data = key(), os.urandom(2 * CHUNK + 500)
    assert write(store, [name], [[memoryview(data)[:120], memoryview(data)[120:30], memoryview(data)[120:]]]) == [True]
    rooms = [bytearray(size) for size in (7, CHUNK, CHUNK + 493)]
    assert store.read([name], [[memoryview(room) for room in rooms]]) == [len(data)]
    assert b"".join(rooms) == data


def test_a_batch_mixes_sizes_misses_and_hits(store: ValkeyStore) -> None:
    sizes = [5, 3 * CHUNK, 50, CHUNK + 1, 20_000, 7]
    keys, data = [key() for _ in sizes], [os.urandom(size) for size in sizes]
    there = [0, 1, 3, 5]
    assert write(store, [keys[i] for i in there], [[memoryview(data[i])] for i in there]) == [True] * 4
    rooms = [bytearray(size) for size in sizes]
    lengths = store.read(keys, [[memoryview(room)] for room in rooms])
    assert lengths == [size if i in there else None for i, size in enumerate(sizes)]
    assert all(rooms[i] == data[i] for i in there)
    assert store.contains(keys) == [i in there for i in range(6)]
    assert store.read([], []) == []
    assert write(store, [], []) == []


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_many_keys_at_once_are_told_apart(store: ValkeyStore, count: int) -> None:
    """All, none, a leading part, every third, and the last only."""
    keys = [key() for _ in range(count)]
    for there in (range(count), range(0), range(count // 2), range(0, count, 3), range(count - 1, count)):
        write(store, [keys[i] for i in there], [[memoryview(b"x")] for _ in there])
        assert store.contains(keys) == [i in there for i in range(count)]
        assert store.contains([*keys[:3], *keys[:3]]) == [i in there for i in range(min(3, count))] * 2
        store.delete(keys)


def test_a_batch_larger_than_any_socket_holds(store: ValkeyStore) -> None:
    """Sent in parts: the server takes the first values while the last ones wait."""
    sizes = [*([1] * 600), 9 << 20, 3, 5 << 20, 20_000]
    keys, data = [key() for _ in sizes], [os.urandom(size) for size in sizes]
    assert all(write(store, keys, [[memoryview(value)[:1], memoryview(value)[1:]] for value in data]))
    rooms = [bytearray(size) for size in sizes]
    assert store.read(keys, [[memoryview(room)] for room in rooms]) == sizes
    assert rooms == data


@pytest.mark.parametrize(("written", "asked"), [(100, 90), (100, 110), (CHUNK, 100), (3 * CHUNK, 2 * CHUNK)])
def test_another_length_is_told(store: ValkeyStore, written: int, asked: int) -> None:
    name = key()
    put(store, name, os.urandom(written))
    assert get(store, name, asked) == written
    assert get(store, name, written) is not None


def test_delete_takes_the_chunks_too(store: ValkeyStore, server: Any) -> None:
    small, large, other = key(), key(), key()
    for name, size in ((small, 50), (large, 5 * CHUNK), (other, 2 * CHUNK)):
        put(store, name, os.urandom(size))
    assert len(names(server)) == 1 + 6 + 3
    store.delete([small, large, key()])
    assert names(server) == {KEY_PREFIX + other.hex().encode() + end for end in (b"", b":0", b":1")}


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_chunk_that_is_gone_is_a_miss_and_the_rest_goes(store: ValkeyStore, server: Any, chunk: int) -> None:
    name = key()
    put(store, name, os.urandom(3 * CHUNK))
    server.client(db=1).delete(KEY_PREFIX + name.hex().encode() + b":%d" % chunk)
    assert get(store, name, 3 * CHUNK) is None
    assert names(server) == set()


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"x" * 28,
        manifest(3 * CHUNK, CHUNK)[:-1],
        manifest(3 * CHUNK, CHUNK + 1),
        manifest(3 * CHUNK, CHUNK) + b"0",
    ],
)
def test_a_manifest_that_is_none_is_a_miss(store: ValkeyStore, server: Any, head: bytes) -> None:
    name = key()
    put(store, name, os.urandom(3 * CHUNK))
    server.client(db=1).set(KEY_PREFIX + name.hex().encode(), head)
    assert get(store, name, 3 * CHUNK) is None


@pytest.mark.parametrize("size", [100, 3 * CHUNK])
def test_something_else_under_the_key_is_a_miss(store: ValkeyStore, server: Any, size: int) -> None:
    name = key()
    server.client(db=1).rpush(KEY_PREFIX + name.hex().encode(), "a list")
    assert get(store, name, size) is None
    store.delete([name])
    assert names(server) == set()
    server.client(db=1).rpush(KEY_PREFIX + name.hex().encode(), "a list")
    data = os.urandom(size)
    assert put(store, name, data)
    assert get(store, name, size) == data


def test_ttl(server: Any) -> None:
    store = ValkeyStore(parse(f"valkey://127.0.0.1:{server.port}/2?ttl=500"), chunk_bytes=CHUNK)
    name = key()
    put(store, name, os.urandom(2 * CHUNK))
    client = server.client(db=2)
    assert all(400 < client.ttl(name) <= 500 for name in client.scan_iter())
    assert len(client.keys()) == 3
    store.close()


def test_a_full_store_says_no_and_still_serves() -> None:
    with valkey(maxmemory="6mb", maxmemory_policy="noeviction") as server:
        store = ValkeyStore(parse(f"valkey://127.0.0.1:{server.port}"), chunk_bytes=1 << 20)
        keys, data = [key() for _ in range(12)], os.urandom(1 << 20)
        stored = [put(store, name, data) for name in keys]
        assert stored[0]
        assert not stored[-1]
        assert get(store, keys[0], len(data)) == data
        large = key()
        assert not put(store, large, os.urandom(4 << 20))
        assert store.contains([large]) == [False]  # no manifest without its chunks
        store.delete(keys)
        assert put(store, keys[-1], data)
        store.close()


def test_the_servers_own_limit_of_a_value_is_kept() -> None:
    with valkey(proto_max_bulk_len="1mb") as server:
        store = open_store(f"valkey://127.0.0.1:{server.port}")
        name, data = key(), os.urandom(3 << 20)
        assert put(store, name, data)
        assert get(store, name, len(data)) == data
        assert len(server.client().keys()) == 4
        store.close()


def test_users_and_passwords() -> None:
    with valkey() as server:
        client = server.client()
        client.config_set("requirepass", "sesame")
        client.execute_command("AUTH", "sesame")
        good = open_store(f"valkey://:s%65same@127.0.0.1:{server.port}")
        assert good.contains([key()]) == [False]
        good.close()
        for secret in ("", ":wrong-secret@", "nobody:wrong-secret@"):
            bad = open_store(f"valkey://{secret}127.0.0.1:{server.port}")
            with pytest.raises(StoreError, match=r"(?i)check the user and the password") as caught:
                bad.contains([key()])
            assert "wrong-secret" not in str(caught.value)
            bad.close()
        rights = "on >pw ~anaphora:* +exists +get +getrange +set +unlink +cluster|slots"
        client.execute_command("ACL", "SETUSER", "cache", *rights.split())
        limited = open_store(f"valkey://cache:pw@127.0.0.1:{server.port}")
        name = key()
        assert put(limited, name, b"x" * 50)
        assert get(limited, name, 50) == b"x" * 50
        limited.delete([name])
        client.execute_command("ACL", "SETUSER", "cache", "-set")
        with pytest.raises(StoreError, match="the user needs EXISTS"):
            put(limited, name, b"x")
        assert limited.contains([name]) == [False]
        limited.close()


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "valkey.sock"
    with valkey(unixsocket=str(path)):
        store = open_store(f"unix://{path}?db=3")
        name = key()
        assert put(store, name, b"x" * 500)
        assert get(store, name, 500) == b"x" * 500
        store.close()


def tls_proxy(folder: Path, port: int) -> Any:
    """host:port of a TLS end in front of a plain server."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def handle(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", port), 5) as behind:
            back = threading.Thread(target=pump, args=(behind, connection))
            back.start()
            pump(connection, behind)
            back.join(5)

    return raw(handle, self_signed(folder))


def test_tls(server: Any, tmp_path: Path) -> None:
    with tls_proxy(tmp_path, server.port) as address:
        store = open_store(f"valkeys://{address}/4?ssl_ca_certs={tmp_path / 'certificate.pem'}")
        name, data = key(), os.urandom(300_000)
        assert put(store, name, data)
        assert get(store, name, len(data)) == data
        store.close()
        trusting = open_store(f"rediss://{address}/4?ssl_cert_reqs=none")
        assert trusting.contains([name]) == [True]
        trusting.close()
        careful = open_store(f"valkeys://{address}/4")
        with pytest.raises(StoreError, match=r"(?i)certificate"):
            careful.contains([name])
        careful.close()


def test_a_server_that_restarts_is_found_again() -> None:
    with valkey() as first:
        port = first.port
        store = open_store(f"valkey://127.0.0.1:{port}")
        assert put(store, key(), b"x")
        first.terminate()
        with pytest.raises(StoreError):
            store.contains([key()])
        first.start()
        name = key()
        assert store.contains([name]) == [False]
        assert put(store, name, b"y")
    store.close()


def test_many_threads_share_a_few_connections(server: Any) -> None:
    store = ValkeyStore(parse(f"valkey://127.0.0.1:{server.port}/5?connections=3&timeout=20"), chunk_bytes=CHUNK)
    wrong: list[int] = []

    def work(number: int) -> None:
        for size in (10, 2 * CHUNK + number, 5000 + number):
            name, data = key(), os.urandom(size)
            if not put(store, name, data) or get(store, name, size) != data:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert server.client().info("clients")["connected_clients"] < 12
    store.close()


def test_nobody_there() -> None:
    store = open_store(f"valkey://127.0.0.1:{free_port()}")
    for operation in (
        lambda: store.contains([key()]),
        lambda: get(store, key(), 5),
        lambda: put(store, key(), b"x"),
        lambda: store.delete([key()]),
    ):
        with pytest.raises(StoreError, match=r"127\.0\.0\.1"):
            operation()
    store.close()


def test_a_cluster_spreads_blocks_and_outlives_a_node() -> None:
    with valkey_cluster() as servers:
        store = ValkeyStore(parse(f"valkey://127.0.0.1:{servers[0].port}?timeout=3"), chunk_bytes=CHUNK)
        sizes = [500] * 150 + [4 * CHUNK] * 30
        keys, data = [key() for _ in sizes], [os.urandom(size) for size in sizes]
        assert all(write(store, keys, [[memoryview(value)] for value in data]))
        assert all(store.contains(keys))
        rooms = [bytearray(size) for size in sizes]
        assert store.read(keys, [[memoryview(room)] for room in rooms]) == sizes
        assert rooms == data
        counts = Counter({server.port: server.client().dbsize() for server in servers})
        assert sum(counts.values()) == 150 + 30 * 5
        assert max(counts.values()) < 1.5 * sum(counts.values()) / 3

        servers[2].terminate()
        found = store.read(keys, [[memoryview(room)] for room in rooms])
        hits = [index for index, length in enumerate(found) if length is not None]
        assert 60 < len(hits) < 150
        assert all(found[index] == sizes[index] and rooms[index] == data[index] for index in hits)
        store.close()


def test_a_slot_that_moves_is_followed() -> None:
    with valkey_cluster(2) as servers:
        store = ValkeyStore(parse(f"valkey://127.0.0.1:{servers[0].port}?timeout=5"))
        name = key()
        assert put(store, name, b"before")
        clients = [server.client() for server in servers]
        ids = [client.execute_command("CLUSTER", "MYID") for client in clients]
        slot = clients[0].execute_command("CLUSTER", "KEYSLOT", KEY_PREFIX + name.hex().encode())
        new = 1 if slot < 8192 else 0
        clients[1 - new].flushall()
        for client in (clients[new], clients[1 - new]):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[new])
        with pytest.raises(StoreError, match="MOVED"):
            put(store, name, b"after!")
        assert put(store, name, b"after!")
        assert get(store, name, 6) == b"after!"
        assert store._topology.node_of(KEY_PREFIX + name.hex().encode()).name.endswith(str(servers[new].port))
        store.close()


def test_a_hanging_node_is_left_alone_after_a_few_tries() -> None:
    with valkey_cluster() as servers:
        store = ValkeyStore(parse(f"valkey://127.0.0.1:{servers[0].port}?timeout=0.3"))
        keys = [key() for _ in range(60)]
        assert all(write(store, keys, [[memoryview(b"x" * 100)] for _ in keys]))
        process = servers[1]._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(3):
                assert 10 < sum(store.contains(keys)) < 60
            node = next(node for node in store._topology._nodes.values() if node.name.endswith(str(servers[1].port)))
            assert not node.breaker.allows()
            assert 10 < sum(store.contains(keys)) < 60
        finally:
            process.send_signal(signal.SIGCONT)
        until(lambda: all(store.contains(keys)), 20)
        store.close()


def test_a_deadline_grows_with_the_bytes() -> None:
    assert Deadline(1.0, 320 << 20).seconds == pytest.approx(11.0)
    with pytest.raises(TimeoutError):
        Deadline(0.0).left()
