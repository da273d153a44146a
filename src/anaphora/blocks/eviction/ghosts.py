"""Names of what was evicted lately, for policies that learn from what comes back."""

from __future__ import annotations

from collections import OrderedDict

from anaphora.types import BlockHash


class Ghosts:
    """Block hashes, the oldest of which is dropped first."""

    def __init__(self) -> None:
        self._names: OrderedDict[BlockHash, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: BlockHash) -> None:
        """As the newest."""
        self._names[name] = None
        self._names.move_to_end(name)

    def discard(self, name: BlockHash) -> bool:
        """Whether it was there."""
        if name in self._names:
            del self._names[name]
            return True
        return False

    def trim(self, count: int) -> None:
        """Keep at most `count`."""
        while len(self._names) > max(0, count):
            self._names.popitem(last=False)
