"""Which blocks a tier holds, and which goes first: the same bookkeeping for RAM and disk.

An entry may go while nobody reads it (`pins`) and no block that continues it is here: leaves go before their
parents, whatever the policy prefers, so what stays is always usable from its start. Children may come before their
parent (a pool gives up leaves first); they are counted by the parent's key, here or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from anaphora.blocks.eviction import EvictionPolicy
from anaphora.errors import BlockStateError
from anaphora.tiers.store import BlockMeta
from anaphora.types import BlockHash

P = TypeVar("P")


class Entry(Generic[P]):
    """One block of a tier; `place` is the tier's own. What policies see of it: hash, depth, last_used."""

    __slots__ = ("depth", "hash", "last_used", "leaving", "parent", "pins", "place")

    def __init__(self, key: BlockHash, parent: BlockHash, depth: int, place: P, last_used: int) -> None:
        self.hash = key
        self.parent = parent
        self.depth = depth
        self.place = place
        self.last_used = last_used
        self.pins = 0
        self.leaving = False
        """Its policy has given it up; it can be found until it is removed."""


class Residents(Generic[P]):
    """Entries by key, and the candidates for eviction. Not thread-safe: its tier holds a lock."""

    def __init__(self, policy: EvictionPolicy[Entry[P]]) -> None:
        self._policy = policy
        self._entries: dict[bytes, Entry[P]] = {}
        self._children: dict[bytes, int] = {}
        self.clock = 0
        """Logical: grows with every use."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Safe without the tier's lock: one dictionary lookup each."""
        entries = self._entries
        return [key in entries for key in keys]

    def get(self, key: bytes) -> Entry[P] | None:
        return self._entries.get(key)

    def entries(self) -> list[Entry[P]]:
        return list(self._entries.values())

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def add(self, entry: Entry[P]) -> None:
        """Take in a new entry. Raises BlockStateError when its key is here already."""
        if entry.hash in self._entries:
            raise BlockStateError("a tier was given the same block twice")
        self._entries[entry.hash] = entry
        children = self._children.get(entry.parent, 0)
        self._children[entry.parent] = children + 1
        parent = self._entries.get(entry.parent)
        if parent is not None and parent.leaving:
            parent = None
        if not children and parent is not None and not parent.pins:
            self._policy.remove(parent)
        self._policy.insert(entry, parent)
        if self._may_go(entry):
            self._policy.add(entry)

    def restore(self, entries: Sequence[Entry[P]]) -> None:
        """Take in what another process left, all different, used longest ago first, into an empty tier."""
        here, children, policy = self._entries, self._children, self._policy
        for entry in entries:
            policy.insert(entry, here.get(entry.parent))
            here[entry.hash] = entry
            children[entry.parent] = children.get(entry.parent, 0) + 1
        for entry in entries:
            if entry.hash not in children:
                policy.add(entry)
        self.clock = entries[-1].last_used if entries else 0

    def remove(self, entry: Entry[P]) -> None:
        """Forget an entry, pinned or not; an entry that is no longer here stays so."""
        if self._entries.get(entry.hash) is not entry:
            return
        if self._may_go(entry):
            self._policy.remove(entry)
        if not entry.leaving:
            self._policy.forget(entry)
        self._forget(entry)

    def touch(self, entry: Entry[P]) -> None:
        """It was used just now."""
        candidate = self._may_go(entry)
        if candidate:
            self._policy.remove(entry)
        entry.last_used = self.tick()
        if not entry.leaving:
            self._policy.hit(entry)
        if candidate:
            self._policy.add(entry)

    def pin(self, entry: Entry[P]) -> None:
        """Keep it until `unpin`; pins count."""
        if self._may_go(entry):
            self._policy.remove(entry)
        entry.pins += 1

    def unpin(self, entry: Entry[P]) -> bool:
        """Undo one `pin`. True: that was the last one of an entry that is no longer here; its place is free now."""
        entry.pins -= 1
        here = self._entries.get(entry.hash) is entry
        if here and self._may_go(entry):
            self._policy.add(entry)
        return not here and entry.pins == 0

    def pop(self) -> Entry[P] | None:
        """Take out the entry that goes first; None when none may go."""
        if not len(self._policy):
            return None
        entry = self._policy.pop()
        self._forget(entry)
        return entry

    def dismiss(self) -> Entry[P] | None:
        """Pin the entry that goes first; None when none may go. It is here until `remove`, which must follow."""
        if not len(self._policy):
            return None
        entry = self._policy.pop()
        entry.leaving = True
        entry.pins += 1
        return entry

    def make_room(self, block: BlockMeta, *, orphans: bool) -> Entry[P] | None:
        """Take out the entry that goes first to make room for `block`; never its own parent. None: it may not come.

        Without `orphans`, a block whose parent is not here pushes nothing out: nobody could reach it.
        """
        parent = self._entries.get(block.parent)
        if parent is None:
            return self.pop() if orphans or not block.depth else None
        self.pin(parent)
        try:
            return self.pop()
        finally:
            self.unpin(parent)

    def check_invariants(self) -> None:
        """Raises BlockStateError when the counts disagree. O(entries)."""
        counted: dict[bytes, int] = {}
        for entry in self._entries.values():
            counted[entry.parent] = counted.get(entry.parent, 0) + 1
        if counted != self._children:
            raise BlockStateError("a tier counts its entries' children wrongly")
        if (free := sum(self._may_go(entry) for entry in self._entries.values())) != len(self._policy):
            raise BlockStateError(f"{free} entries of a tier may go, its policy knows {len(self._policy)}")

    def _may_go(self, entry: Entry[P]) -> bool:
        return not entry.pins and not entry.leaving and entry.hash not in self._children

    def _forget(self, entry: Entry[P]) -> None:
        del self._entries[entry.hash]
        left = self._children[entry.parent] - 1
        if left:
            self._children[entry.parent] = left
            return
        del self._children[entry.parent]
        if (parent := self._entries.get(entry.parent)) is not None:
            parent.last_used = max(parent.last_used, entry.last_used)
            if self._may_go(parent):
                self._policy.add(parent)
