"""What a server can do to us, on real sockets: hang, dribble, hang up, lie. Each costs a bounded time and a miss."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from anaphora.tiers.remote.registry import open_remote
from anaphora.tiers.remote.tier import RemoteTier
from anaphora.tiers.store import Outcome
from support.broken_servers import raw, says, silent
from support.remote import Answer, dribble, hangs, pretended_valkey, then_closes, value
from support.stored_blocks import chain, payload, payloads, room

BLOCKS = chain("faults", 3)
SIZE = 8192
FOUND = value(b"x" * 100)
MOST_SECONDS = 8
"""Of one operation with a timeout of 0.3 s, on a machine that may be busy."""


@pytest.fixture
def never() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def outcomes_of(address: str) -> tuple[set[Outcome], RemoteTier]:
    """What three blocks' load comes to; no operation takes long, none raises."""
    tier = RemoteTier(open_remote(f"valkey://{address}?timeout=0.3"))
    start = time.monotonic()
    outcomes = tier.load(BLOCKS, room(3))
    assert time.monotonic() - start < MOST_SECONDS
    start = time.monotonic()
    assert set(tier.contains([block.key for block in BLOCKS])) <= {True, False}
    saved = tier.save(BLOCKS, payloads(BLOCKS))
    assert len(saved) == 3
    tier.discard([BLOCKS[0].key])
    assert time.monotonic() - start < 3 * MOST_SECONDS
    tier.close()
    return set(outcomes), tier


def test_the_pretender_is_a_plain_server() -> None:
    with pretended_valkey({}) as address:
        outcomes, tier = outcomes_of(address)
        assert outcomes == {Outcome.MISS}
        assert tier.stats().saved == 3


def huge_length(connection: socket.socket) -> None:
    """Announces 99 GB and starts to send them."""
    connection.sendall(b"$99999999999\r\n")
    while True:
        connection.sendall(b"x" * 65536)


LIES: dict[str, Answer] = {
    "wrong type of reply: number": b":5\r\n",
    "wrong type of reply: text": b"+OK\r\n",
    "wrong type of reply: list": b"*2\r\n$1\r\na\r\n$1\r\nb\r\n",
    "not the protocol at all": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "length is no number": b"$many\r\nx\r\n",
    "length is beyond all numbers": b"$" + b"9" * 40 + b"\r\n",
    "a line without an end": b"$" * 100_000,
    "longer than announced": b"$100\r\n" + b"x" * 120 + b"\r\n",
    "hangs up at once": then_closes(b""),
    "hangs up inside a length": then_closes(b"$83"),
    "hangs up inside a value": then_closes(value(b"x" * 8388)[:4000]),
    "hangs up before the end of the line": then_closes(value(b"x" * 8388)[:-1]),
    "a value of 99 GB": huge_length,
    "dribbles the length": dribble(b"$8388\r\n" * 2000, 0.05),
    "dribbles the value": dribble(value(b"x" * 8388), 0.05),
    "an error": b"-ERR nothing works today\r\n",
    "it is loading": b"-LOADING Valkey is loading the dataset in memory\r\n",
    "cluster is down": b"-CLUSTERDOWN Hash slot not served\r\n",
    "moved to nowhere": b"-MOVED 1234 127.0.0.1:1\r\n",
    "too many clients": b"-ERR max number of clients reached\r\n",
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_server_that_answers_reads_with(lie: Answer) -> None:
    with pretended_valkey({b"GET": lie}) as address:
        outcomes, _ = outcomes_of(address)
        assert outcomes == {Outcome.FAILED}


@pytest.mark.parametrize("command", [b"GET", b"SET", b"EXISTS", b"CLUSTER", b"CONFIG", b"UNLINK"])
def test_a_server_that_hangs_at(command: bytes, never: threading.Event) -> None:
    with pretended_valkey({command: hangs(never)}) as address:
        outcomes, _ = outcomes_of(address)
        never.set()
        assert outcomes <= {Outcome.FAILED, Outcome.MISS}


@pytest.mark.parametrize("command", [b"SET", b"EXISTS", b"CLUSTER", b"CONFIG", b"UNLINK", b"GETRANGE"])
@pytest.mark.parametrize(
    "lie", [b"*-1\r\n", b"$-1\r\n", b":-7\r\n", b"*3\r\n*3\r\n:1\r\n:2\r\n:3\r\n+a\r\n+b\r\n", FOUND]
)
def test_odd_replies_to(command: bytes, lie: bytes) -> None:
    with pretended_valkey({command: lie}) as address:
        outcomes, _ = outcomes_of(address)
        assert outcomes <= {Outcome.FAILED, Outcome.MISS}


@pytest.mark.parametrize(
    "topology",
    [
        b"*1\r\n*3\r\n:0\r\n:99999999999\r\n*2\r\n$0\r\n\r\n:6379\r\n",
        b"*1\r\n*3\r\n:-5\r\n:5\r\n*2\r\n$9\r\n127.0.0.1\r\n:1\r\n",
        b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n$4\r\nport\r\n",
        b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:1\r\n",
        b"*0\r\n",
        b"*1\r\n" * 50 + b":1\r\n",
        b"*999999999\r\n",
    ],
)
def test_absurd_clusters(topology: bytes) -> None:
    with pretended_valkey({b"CLUSTER": topology}) as address:
        outcomes, _ = outcomes_of(address)
        assert outcomes <= {Outcome.FAILED, Outcome.MISS}


@pytest.mark.parametrize("handle", [silent, says(b""), says(b"SSH-2.0-OpenSSH_9.2p1\r\n"), says(b"\0" * 70_000)])
def test_what_is_no_valkey_at_all(handle: Callable[[socket.socket], None]) -> None:
    with raw(handle) as address:
        outcomes, tier = outcomes_of(address)
        assert outcomes == {Outcome.FAILED}
        assert tier.stats().failed == 3


def test_a_value_is_dropped_whatever_its_length() -> None:
    with pretended_valkey({b"GET": value(b"y" * 3_000_000)}) as address:
        outcomes, _ = outcomes_of(address)
        assert outcomes == {Outcome.CORRUPT}


def test_a_sick_server_is_asked_a_few_times_only(never: threading.Event) -> None:
    asked: list[float] = []

    def count(_: socket.socket) -> None:
        asked.append(time.monotonic())
        never.wait(30)

    with raw(count) as address:
        tier = RemoteTier(open_remote(f"valkey://{address}?timeout=0.1"))
        for _ in range(50):
            assert tier.load(BLOCKS[:1], room(1)) == [Outcome.FAILED]
        assert len(asked) == 3
        assert "no answer within" in tier.stats().off or "timed out" in tier.stats().off.lower()
        assert tier.contains([block.key for block in BLOCKS]) == [False] * 3
        assert tier.save(BLOCKS, [payload(block) for block in BLOCKS]) == [Outcome.FAILED] * 3
        assert len(asked) == 3
        never.set()
        tier.close()
