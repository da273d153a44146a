"""What the scheduler asks of the tiers behind the pool; and how it is where there are none.

poll        at the start of every step: what came is findable, what was stored is let go
fetch       before a request is admitted: is it worth waiting for blocks from a tier?
admitted, computed, preempted, finished       what becomes of the request's blocks
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from anaphora.blocks.matching import PrefixMatch
from anaphora.engine.request import Request
from anaphora.types import BlockHash


class Offload(Protocol):
    """Call it from the engine's thread. Nothing here blocks, but `settle` for a moment."""

    def poll(self) -> None:
        """Take note of the transfers that are over. State changes: blocks become findable, or are released."""

    def arrived(self, request: Request) -> None:
        """The request begins to wait, for the first time or preempted: tiers are asked what they have of it."""

    def in_flight(self) -> Collection[BlockHash]:
        """Prefixes whose blocks are being loaded: requests that need them wait instead of computing them."""

    def undecided(self, request: Request) -> bool:
        """Whether `fetch` has something to decide about the request, so that a load can begin while others compute."""

    def fetch(self, request: Request, match: PrefixMatch, room: int) -> bool:
        """Whether the request waits: for a tier's answer, or for blocks that it loads from now on.

        `match` is what the pool has of it, `room` the blocks that may be taken. State changes: blocks are pinned.
        """

    def admitted(self, request: Request, match: PrefixMatch) -> None:
        """The request runs from now on, with what was matched."""

    def computed(self, request: Request) -> None:
        """The request's whole blocks are committed: tiers may store them. Before the windows slide on."""

    def preempted(self, request: Request) -> None:
        """The request will give its table up and wait again."""

    def finished(self, request: Request) -> None:
        """The request gives its table up, if it has one, and is forgotten."""

    def settle(self) -> bool:
        """Blocks ran out: wait a moment for those that are held until they are stored. Whether some were let go."""


class NoOffload:
    """There is nothing behind the pool."""

    def poll(self) -> None: ...

    def arrived(self, request: Request) -> None: ...

    def in_flight(self) -> Collection[BlockHash]:
        return ()

    def undecided(self, request: Request) -> bool:
        return False

    def fetch(self, request: Request, match: PrefixMatch, room: int) -> bool:
        return False

    def admitted(self, request: Request, match: PrefixMatch) -> None: ...

    def computed(self, request: Request) -> None: ...

    def preempted(self, request: Request) -> None: ...

    def finished(self, request: Request) -> None: ...

    def settle(self) -> bool:
        return False
