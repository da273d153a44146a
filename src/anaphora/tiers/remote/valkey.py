"""Blocks in Valkey or Redis, alone or as a cluster.

    valkey://USER:PASSWORD@HOST:PORT/DB?timeout=2&connections=4&ttl=86400      valkeys:// with TLS
    redis:// and rediss:// mean the same; unix:///run/valkey.sock?db=1 is a socket

A batch is one pipelined exchange with every node that holds some of its keys. Values of more than CHUNK_BYTES lie in
chunks (see chunks.py), which a cluster spreads over its nodes like any other key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

from anaphora.tiers.remote.chunks import MANIFEST_BYTES, chunk_keys, count_chunks, manifest, read_manifest, split
from anaphora.tiers.remote.deadline import Deadline
from anaphora.tiers.remote.valkey_exchange import Command, Result, exchange
from anaphora.tiers.remote.valkey_nodes import Topology
from anaphora.tiers.remote.valkey_url import ValkeyOptions, parse

CHUNK_BYTES = 4 << 20
"""Larger values are cut: a server answers one command at a time, and others wait while it copies."""
TOGETHER = 64
"""Keys of one question whether they are there."""
KEY_PREFIX = b"anaphora:"


def open_store(url: str) -> ValkeyStore:
    """The store behind `url`; connects when first asked. Raises ConfigError for a wrong URL."""
    return ValkeyStore(parse(url))


class ValkeyStore:
    """A RemoteStore. Thread-safe; an operation holds one connection to each node it asks."""

    def __init__(self, options: ValkeyOptions, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._options = options
        self._chunk_bytes = chunk_bytes
        self._topology = Topology(options.connection, options.connections)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        deadline = Deadline(self._options.timeout)
        self._topology.learn(deadline)
        # A server says of many keys how many it has, which mostly is none or all. A cluster's lie on many nodes.
        step = 1 if self._topology.is_cluster else TOGETHER
        groups = [list(keys[start : start + step]) for start in range(0, len(keys), step)]
        counts = self._counts(groups, deadline)
        unsure = [key for group, count in zip(groups, counts, strict=True) if 0 < count < len(group) for key in group]
        single = iter(self._counts([[key] for key in unsure], deadline))
        found: list[bool] = []
        for group, count in zip(groups, counts, strict=True):
            mixed = 0 < count < len(group)
            found += [next(single) == 1 for _ in group] if mixed else [count == len(group)] * len(group)
        return found

    def read(self, keys: Sequence[bytes], into: Sequence[Sequence[memoryview]]) -> list[int | None]:
        sizes = [_size(views) for views in into]
        deadline = Deadline(self._options.timeout, sum(sizes))
        limit = self._limit(deadline)
        heads = {index: bytearray(MANIFEST_BYTES) for index, size in enumerate(sizes) if size > limit}
        commands: list[Command] = []
        for index, (key, views) in enumerate(zip(keys, into, strict=True)):
            name = _name(key)
            if index in heads:
                commands.append(_get(name, [memoryview(heads[index])]))
                commands += map(_get, chunk_keys(name, sizes[index], limit), split(views, limit))
            else:
                commands.append(_get(name, views))
        results = iter(self._run(commands, deadline))
        found: list[int | None] = []
        broken: list[bytes] = []
        for index, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            length = _length(next(results))
            if index in heads:
                pieces = [_length(next(results)) for _ in range(count_chunks(size, limit))]
                if length is not None:
                    length = _whole(bytes(heads[index]), size, limit, pieces)
                    if length is None:
                        broken.append(key)
            found.append(length)
        if broken:
            self._delete(broken, deadline)
        return found

    def write(self, keys: Sequence[bytes], sizes: Sequence[int], parts: Sequence[Sequence[memoryview]]) -> list[bool]:
        deadline = Deadline(self._options.timeout, sum(sizes))
        limit = self._limit(deadline)
        whole = cache(parts.__getitem__)

        def piece(index: int, number: int) -> Iterator[memoryview]:
            yield from whole(index) if sizes[index] <= limit else split(whole(index), limit)[number]

        commands: list[Command] = []
        owners: list[int] = []
        for index, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            names = [_name(key)] if size <= limit else chunk_keys(_name(key), size, limit)
            for number, name in enumerate(names):
                commands.append(self._set(name, min(limit, size - number * limit), piece(index, number)))
                owners.append(index)
        stored = [True] * len(keys)
        for index, result in zip(owners, self._run(commands, deadline), strict=True):
            stored[index] &= result == b"OK"
        # A manifest goes out only when its chunks are there: whoever finds it may count on them.
        late = [index for index, size in enumerate(sizes) if size > limit and stored[index]]
        heads = [self._set(_name(keys[i]), MANIFEST_BYTES, [memoryview(manifest(sizes[i], limit))]) for i in late]
        for index, result in zip(late, self._run(heads, deadline), strict=True):
            stored[index] = result == b"OK"
        return stored

    def delete(self, keys: Sequence[bytes]) -> None:
        self._delete(keys, Deadline(self._options.timeout))

    def register(self, memory: memoryview) -> None:
        """Nothing to do: a socket reads into any memory."""

    def close(self) -> None:
        self._topology.close()

    def _counts(self, groups: Sequence[Sequence[bytes]], deadline: Deadline) -> list[int]:
        """How many keys of each group there are."""
        commands = [_command(b"EXISTS", *map(_name, group)) for group in groups]
        return [_length(result) or 0 for result in self._run(commands, deadline)]

    def _delete(self, keys: Sequence[bytes], deadline: Deadline) -> None:
        """Remove the values, and the chunks of those that are cut."""
        doomed = [_name(key) for key in keys]
        heads = [bytearray(MANIFEST_BYTES) for _ in keys]
        last = b"%d" % (MANIFEST_BYTES - 1)
        peek = [
            _command(b"GETRANGE", name, b"0", last, into=[memoryview(head)])
            for name, head in zip(doomed, heads, strict=True)
        ]
        self._run(peek, deadline)
        for name, head in zip(list(doomed), heads, strict=True):
            if (known := read_manifest(head)) is not None:
                doomed += chunk_keys(name, *known)
        self._run([_command(b"UNLINK", name) for name in doomed], deadline)

    def _set(self, name: bytes, size: int, value: Iterable[memoryview]) -> Command:
        ttl = b"%d" % self._options.ttl
        tail = b"\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl) if self._options.ttl else b"\r\n"
        words = 5 if self._options.ttl else 3
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (words, len(name), name, size)
        return Command(name, chain((head,), value, (tail,)))

    def _limit(self, deadline: Deadline) -> int:
        """Bytes of a chunk: ours, or what the server takes at most. All clients of a server come to the same."""
        self._topology.learn(deadline)
        return min(self._chunk_bytes, self._topology.longest_value or self._chunk_bytes)

    def _run(self, commands: Sequence[Command], deadline: Deadline) -> list[Result]:
        self._topology.learn(deadline)
        return exchange(self._topology, commands, deadline)


def _name(key: bytes) -> bytes:
    """Readable in the server's own tools, and free of braces, which a cluster would take for a hash tag."""
    return KEY_PREFIX + key.hex().encode()


def _size(views: Sequence[memoryview]) -> int:
    return sum(map(len, views))


def _command(*words: bytes, into: Sequence[memoryview] | None = None) -> Command:
    packed = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    return Command(words[1], [b"*%d\r\n%b" % (len(words), packed)], into)


def _get(name: bytes, into: Sequence[memoryview]) -> Command:
    return _command(b"GET", name, into=into)


def _length(result: Any) -> int | None:
    return result if isinstance(result, int) else None


def _whole(head: bytes, size: int, limit: int, pieces: Sequence[int | None]) -> int | None:
    """Length of a value behind its manifest; None where the manifest is none, or a chunk is missing or another's."""
    known = read_manifest(head)
    if known is None:
        return None
    if known != (size, limit):
        return known[0] if known[0] != size else None
    return size if list(pieces) == [min(limit, size - at) for at in range(0, size, limit)] else None
