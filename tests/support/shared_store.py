"""A shared store in this process, for tests that need its gate rather than a network."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class Shared:
    """A RemoteStore in this process. `gate` closed: everything waits, as on a network that hangs."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self.gate.wait(10)
        return [key in self.values for key in keys]

    def read(self, keys: Sequence[bytes], into: Sequence[Sequence[memoryview]]) -> list[int | None]:
        self.gate.wait(10)
        lengths: list[int | None] = []
        for name, views in zip(keys, into, strict=True):
            value = self.values.get(name)
            lengths.append(None if value is None else len(value))
            at = 0
            for view in views if value is not None and len(value) == sum(v.nbytes for v in views) else ():
                view[:] = value[at : at + view.nbytes]  # type: ignore[index]
                at += view.nbytes
        return lengths

    def write(self, keys: Sequence[bytes], sizes: Sequence[int], parts: Sequence[Sequence[memoryview]]) -> list[bool]:
        self.gate.wait(10)
        for name, pieces in zip(keys, parts, strict=True):
            self.values[name] = b"".join(bytes(piece) for piece in pieces)
        return [True] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        for name in keys:
            self.values.pop(name, None)

    def register(self, memory: memoryview) -> None:
        pass

    def close(self) -> None:
        pass
