"""Where keys live: one server, or the nodes of a cluster, each behind a small pool of connections."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from queue import Empty, LifoQueue
from typing import Any

from valkey.connection import SSLConnection, UnixDomainSocketConnection
from valkey.crc import key_slot
from valkey.exceptions import AuthenticationError, NoPermissionError, ResponseError, ValkeyError

from anaphora.tiers.remote.breaker import CircuitBreaker
from anaphora.tiers.remote.deadline import Deadline
from anaphora.tiers.remote.resp import (
    BoundedConnection,
    BoundedParser,
    BoundedTLSConnection,
    BoundedUnixConnection,
    Reply,
)
from anaphora.tiers.store import StoreError

CLUSTER_SLOTS = b"*2\r\n$7\r\nCLUSTER\r\n$5\r\nSLOTS\r\n"
LONGEST_VALUE = b"*3\r\n$6\r\nCONFIG\r\n$3\r\nGET\r\n$18\r\nproto-max-bulk-len\r\n"
SLOTS = 16384

_NEXT_STEPS: dict[type[Exception], str] = {
    AuthenticationError: "; check the user and the password in the URL of --remote-cache",
    NoPermissionError: "; the user needs EXISTS, GET, GETRANGE, SET and UNLINK on anaphora:*, and CLUSTER|SLOTS",
}
_BOUNDED: dict[type, type] = {SSLConnection: BoundedTLSConnection, UnixDomainSocketConnection: BoundedUnixConnection}


class Node:
    """One server: its connections, and whether it is worth asking."""

    def __init__(self, settings: Mapping[str, Any], connections: int) -> None:
        """`settings` are the Valkey client's keyword arguments of a connection, as its `parse_url` gives them."""
        kind = settings.get("connection_class")
        settings = {name: value for name, value in settings.items() if name != "connection_class"}
        make = _BOUNDED[kind] if kind else BoundedConnection
        self.name = settings.get("path") or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"
        self.breaker = CircuitBreaker()
        self._connections = connections
        self._closed = False
        self._idle: LifoQueue[Any] = LifoQueue()
        for _ in range(connections):
            self._idle.put(make(**settings, parser_class=BoundedParser, lib_name=None, lib_version=None))

    def lend(self, deadline: Deadline) -> Any:
        """A connection that is ready; give it back. Raises StoreError when all are in use until the deadline,
        OSError or ValkeyError when none can be made."""
        try:
            lent = self._idle.get(timeout=deadline.left())
        except Empty:
            raise StoreError(f"all {self._connections} connections to {self.name} are busy; allow more") from None
        try:
            lent.prepare(deadline)
        except BaseException:
            self.give_back(lent, whole=False)
            raise
        return lent

    def give_back(self, lent: Any, *, whole: bool) -> None:
        """`whole`: every answer was read. Otherwise the connection is closed: who knows what still comes out of it."""
        if not whole or self._closed:
            lent.disconnect()
        self._idle.put(lent)

    def ask(self, command: bytes, deadline: Deadline) -> Reply:
        """One small command's reply."""
        lent = self.lend(deadline)
        whole = False
        try:
            lent.send([command])
            reply: Reply = lent.receive()
            whole = True
        finally:
            self.give_back(lent, whole=whole)
        return reply

    def close(self) -> None:
        """Close the connections at rest at once, those in use when they are given back."""
        self._closed = True
        while True:
            try:
                self._idle.get_nowait().disconnect()
            except Empty:
                return


class Topology:
    """Which node holds a key. Learned at the first use, and again when a node says it has moved."""

    def __init__(self, settings: Mapping[str, Any], connections: int) -> None:
        self._settings = dict(settings)
        self._connections = connections
        self._seed = Node(settings, connections)
        self._nodes: dict[str, Node] = {}
        self._slots: list[Node] | None = None
        """The node of each slot; None: one server for all."""
        self._known = False
        self._lock = threading.Lock()
        self.longest_value: int | None = None
        """What the server takes at most as one value, where it says."""

    @property
    def name(self) -> str:
        return self._seed.name

    @property
    def is_cluster(self) -> bool:
        return self._slots is not None

    def node_of(self, key: bytes) -> Node:
        """Keys hold no hash tag, so CRC16 spreads them evenly over the slots."""
        slots = self._slots
        return self._seed if slots is None else slots[key_slot(key)]

    def forget(self) -> None:
        """Ask for the topology again before the next operation."""
        self._known = False

    def learn(self, deadline: Deadline) -> None:
        """Ask the nodes in turn, unless nothing has changed. Raises StoreError when none can be asked."""
        if self._known:
            return
        with self._lock:
            failure: StoreError | None = None
            healthy_first = sorted((self._seed, *self._nodes.values()), key=lambda node: node.breaker.state.value)
            for node in () if self._known else healthy_first:
                try:
                    reply = node.ask(CLUSTER_SLOTS, deadline)
                    self.longest_value = _longest_value(node.ask(LONGEST_VALUE, deadline))
                except (OSError, ValkeyError, StoreError) as error:
                    node.breaker.failed()
                    failure = failure or store_error(node.name, error)
                    continue
                self._slots = None if isinstance(reply, ResponseError) else self._read(reply)
                self._known = True
                return
            if failure is not None:
                raise failure

    def _read(self, reply: Any) -> list[Node] | None:
        """CLUSTER SLOTS: [[first slot, last slot, [host, port, ...] of the primary, replicas ...], ...]."""
        slots: dict[int, Node] = {}
        try:
            for first, last, (host, port, *_), *_ in reply:
                slots |= dict.fromkeys(range(max(first, 0), min(last, SLOTS - 1) + 1), self._node(host, int(port)))
        except (TypeError, ValueError) as error:
            raise StoreError(f"{self.name} describes its cluster in no known way ({error})") from error
        if slots and len(slots) < SLOTS:
            raise StoreError(f"the cluster of {self.name} has slots that no node holds; see CLUSTER INFO there")
        self._nodes = {node.name: node for node in slots.values()}
        return [slots[slot] for slot in range(SLOTS)] if slots else None

    def _node(self, host: object, port: object) -> Node:
        """The node at this address; a cluster that does not know its own host's name means the one we asked."""
        name = host.decode() if isinstance(host, bytes) and host not in (b"", b"?") else self._settings.get("host")
        address = f"{name}:{port}"
        if address == self._seed.name:
            return self._seed
        return self._nodes.get(address) or Node({**self._settings, "host": name, "port": port}, self._connections)

    def close(self) -> None:
        for node in (self._seed, *self._nodes.values()):
            node.close()


def store_error(name: str, error: Exception) -> StoreError:
    """What the server or the network said, with what to do about it where we know."""
    if isinstance(error, StoreError):
        return error
    hint = next((text for kind, text in _NEXT_STEPS.items() if isinstance(error, kind)), "")
    return StoreError(f"{name}: {error or type(error).__name__}{hint}")


def _longest_value(reply: Reply) -> int | None:
    """From CONFIG GET; a managed service may forbid it."""
    if isinstance(reply, list) and len(reply) == 2 and isinstance(reply[1], bytes) and reply[1].isdigit():
        return int(reply[1])
    return None
