"""What the engine holds while blocks are on their way. Workers write it, the engine's thread reads it.

prepare   the engine pins the pool's blocks, the hierarchy starts      Load or Save, not done
complete  Hierarchy.poll() hands it over, done                         the engine unpins; computes what is not OK
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from anaphora.tiers.store import BlockMeta, Outcome

NOWHERE = -1
"""The place of a key that no tier has."""


@dataclass(slots=True, eq=False)
class Lookup:
    """Where each of the asked keys lies: `places[i]` is an index into Hierarchy.tiers, or NOWHERE."""

    places: list[int]
    done: bool
    """False while a remote is being asked about the keys that no local tier has."""

    def prefix(self) -> int:
        """Leading keys that are somewhere."""
        return next((i for i, place in enumerate(self.places) if place == NOWHERE), len(self.places))


@dataclass(slots=True, eq=False)
class TierShare:
    """One tier's part of a load."""

    blocks: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    """From the load's start until the tier's last block of it."""


@dataclass(slots=True, eq=False)
class Load:
    """Blocks on their way. Their memory belongs to the tiers until `done`, cancelled or not."""

    blocks: Sequence[BlockMeta]
    into: Sequence[memoryview]
    arrived: Callable[[int, bool], None] | None = None
    """Called on a worker for each block, with its index and whether it is whole, before the load is done."""
    outcomes: list[Outcome | None] = field(init=False)
    """Per block; None: under way. OK: the bytes are whole and verified."""
    shares: dict[str, TierShare] = field(default_factory=dict)
    """By the tier's name: what the blocks that came cost."""
    started: float = field(default_factory=monotonic)
    left: int = field(init=False)
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.outcomes = [None] * len(self.blocks)
        self.left = len(self.blocks)

    @property
    def done(self) -> bool:
        return self.left == 0

    def ready(self) -> int:
        """Leading blocks that are there."""
        return next((i for i, outcome in enumerate(self.outcomes) if outcome is not Outcome.OK), len(self.outcomes))

    def cancel(self) -> None:
        """Nobody waits for it any more: what has not begun is left out."""
        self.cancelled = True


@dataclass(slots=True, eq=False)
class Save:
    """Blocks on their way out of the pool; their memory must stay as it is until `done`."""

    blocks: Sequence[BlockMeta]
    data: Sequence[memoryview]
    left: int
    """Writes that still read the pool's memory."""
    stored: int = 0
    """Of those that are over, how many the tier took."""

    @property
    def done(self) -> bool:
        return self.left == 0
