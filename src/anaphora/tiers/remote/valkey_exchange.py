"""One pipelined exchange with every node that a batch of commands concerns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    frames: list[bytes | memoryview]
    into: Sequence[memoryview] | None = None


def exchange(topology: Topology, commands: Sequence[Command], deadline: Deadline) -> list[Result]:
    """Send every command, then read every answer: nodes work at the same time. Results in order of the commands.

    Where a node fails, or refuses a command, the result is an exception. Raises StoreError when no command got any
    further than that; a store that is full, or holds something else under a key, did answer.
    """
    shares: dict[Node, list[int]] = {}
    for index, command in enumerate(commands):
        shares.setdefault(topology.node_of(command.key), []).append(index)
    results: list[Result] = [None] * len(commands)
    open_: dict[Node, Any] = {}
    try:
        for node, share in shares.items():
            try:
                open_[node] = connection = _lend(node, topology, deadline)
                connection.send(frame for index in share for frame in commands[index].frames)
            except (OSError, ValkeyError, StoreError) as error:
                _node_failed(node, share, error, results, open_)
        for node, connection in list(open_.items()):
            share = shares[node]
            try:
                for index in share:
                    into = commands[index].into
                    results[index] = connection.receive() if into is None else connection.receive_into(into)
            except (OSError, ValkeyError) as error:
                _node_failed(node, share, error, results, open_)
            else:
                node.breaker.succeeded()
                node.give_back(open_.pop(node), whole=True)
    finally:
        for node, connection in open_.items():
            node.give_back(connection, whole=False)
    _judge(topology, results)
    return results


def _lend(node: Node, topology: Topology, deadline: Deadline) -> Any:
    if topology.is_cluster and not node.breaker.allows():
        raise StoreError(f"{node.name} has failed again and again and is left alone for now")
    return node.lend(deadline)


def _node_failed(
    node: Node, share: Sequence[int], error: Exception, results: list[Result], open_: dict[Node, Any]
) -> None:
    """None of its answers counts: who knows which command the last one belongs to."""
    if not isinstance(error, StoreError):
        node.breaker.failed()
    if node in open_:
        node.give_back(open_.pop(node), whole=False)
    failure = store_error(node.name, error)
    for index in share:
        results[index] = failure


def _judge(topology: Topology, results: Sequence[Result]) -> None:
    errors = [result for result in results if isinstance(result, Exception)]
    if any(str(error).startswith(MOVED) for error in errors):
        topology.forget()
    if not errors or len(errors) < len(results) or any(_concerns_one_key(error) for error in errors):
        return
    raise store_error(topology.name, errors[0])


def _concerns_one_key(error: Exception) -> bool:
    return isinstance(error, OutOfMemoryError) or str(error).startswith("WRONGTYPE ")
