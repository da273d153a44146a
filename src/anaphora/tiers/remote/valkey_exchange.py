"""One pipelined exchange with every node that a batch of commands concerns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from valkey.exceptions import OutOfMemoryError, ValkeyError

from anaphora.tiers.remote.deadline import Deadline
from anaphora.tiers.remote.resp import Reply
from anaphora.tiers.remote.valkey_nodes import Node, Topology, store_error
from anaphora.tiers.store import StoreError

Result = Reply | Exception
MOVED = ("MOVED ", "ASK ", "TRYAGAIN ", "CLUSTERDOWN ")
"""A cluster's words for: the topology is not what you think."""


@dataclass(slots=True)
class Command:
    """What is sent, and where the value goes if the command asks for one."""

    key: bytes
    """Decides which node is asked."""
    frames: Iterable[bytes | memoryview]
    """Taken once, when it is sent."""
    into: Sequence[memoryview] | None = None


def exchange(topology: Topology, commands: Sequence[Command], deadline: Deadline) -> list[Result]:
    """Send every command, then read every answer: nodes work at the same time. Results in order of the commands.

    Where a node fails, or refuses a command, the result is an exception. Raises StoreError when no command got any
    further than that; a store that is full, or holds something else under a key, did answer.
    """
    shares: dict[Node, list[int]] = {}
    for index, command in enumerate(commands):
        shares.setdefault(topology.node_of(command.key), []).append(index)
    run = _Exchange(topology, commands, shares, deadline)
    try:
        for node in shares:
            run.send(node)
        run.receive()
    finally:
        run.close()
    _judge(topology, run.results)
    return run.results


class _Exchange:
    """The state of one exchange. All nodes share its deadline, so only those that let it pass are blamed for it."""

    def __init__(
        self, topology: Topology, commands: Sequence[Command], shares: dict[Node, list[int]], deadline: Deadline
    ) -> None:
        self.results: list[Result] = [None] * len(commands)
        self._topology = topology
        self._commands = commands
        self._shares = shares
        self._deadline = deadline
        self._waiting: dict[Node, Any] = {}
        """The connection to each node that has been asked and has not answered."""

    def send(self, node: Node) -> None:
        if self._deadline.over:
            self._failed(node, StoreError(f"{node.name}: no time was left to ask"))
        elif self._topology.is_cluster and not node.breaker.allows():
            self._failed(node, StoreError(f"{node.name} has failed again and again and is left alone for now"))
        else:
            try:
                connection = self._waiting[node] = node.lend(self._deadline)
                connection.send(frame for index in self._shares[node] for frame in self._commands[index].frames)
            except (OSError, ValkeyError, StoreError) as error:
                self._failed(node, error)

    def receive(self) -> None:
        """Read whoever answers first, so that a node which hangs holds up nobody but itself."""
        with DefaultSelector() as selector:
            for node, connection in self._waiting.items():
                selector.register(connection.fileno(), EVENT_READ, node)
            while self._waiting:
                ready = [key for key, _ in selector.select(self._deadline.remaining())]
                if not ready:
                    for node in list(self._waiting):
                        self._failed(node, TimeoutError(f"no answer within {self._deadline.seconds:.1f} s"))
                for key in ready:
                    selector.unregister(key.fileobj)
                    self._read(key.data)

    def close(self) -> None:
        for node, connection in self._waiting.items():
            node.give_back(connection, whole=False)

    def _read(self, node: Node) -> None:
        connection = self._waiting[node]
        try:
            for index in self._shares[node]:
                into = self._commands[index].into
                self.results[index] = connection.receive() if into is None else connection.receive_into(into)
        except (OSError, ValkeyError) as error:
            self._failed(node, error)
        else:
            node.breaker.succeeded()
            node.give_back(self._waiting.pop(node), whole=True)

    def _failed(self, node: Node, error: Exception) -> None:
        """None of its answers counts: who knows which command the last one belongs to."""
        if not isinstance(error, StoreError):
            node.breaker.failed()
        if node in self._waiting:
            node.give_back(self._waiting.pop(node), whole=False)
        failure = store_error(node.name, error)
        for index in self._shares[node]:
            self.results[index] = failure


def _judge(topology: Topology, results: Sequence[Result]) -> None:
    errors = [result for result in results if isinstance(result, Exception)]
    if any(str(error).startswith(MOVED) for error in errors):
        topology.forget()
    if not errors or len(errors) < len(results) or any(_concerns_one_key(error) for error in errors):
        return
    raise store_error(topology.name, errors[0])


def _concerns_one_key(error: Exception) -> bool:
    return isinstance(error, OutOfMemoryError) or str(error).startswith("WRONGTYPE ")
