"""One request's blocks on their way into the pool: pinned, not findable until they are whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from anaphora.blocks.hashing import HashChain
from anaphora.blocks.table import BlockTable
from anaphora.tiers.store import Outcome
from anaphora.tiers.transfers import Load, TierShare
from anaphora.types import BlockHash


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brought: whole blocks of depth start .. stop."""

    start: int
    stop: int
    shares: Mapping[str, TierShare]

    def split(self, tokens: int) -> list[tuple[str, int, float]]:
        """`tokens` of it by tier, in proportion to the blocks that came from each: (name, tokens, seconds)."""
        left, blocks = tokens, sum(share.blocks for share in self.shares.values())
        parts = []
        for name, share in self.shares.items():
            part = round(left * share.blocks / blocks) if blocks else 0
            parts.append((name, part, share.seconds))
            left, blocks = left - part, blocks - share.blocks
        return parts


@dataclass(slots=True, eq=False)
class Loading:
    """A load and the table that pins its blocks, until the load is done, whatever becomes of the request."""

    tokens: Sequence[int]
    chain: HashChain
    table: BlockTable
    start: int
    stop: int
    wanted: Sequence[tuple[int, int]]
    """(group, depth) of each block of the load."""
    tiers: frozenset[int]
    load: Load
    computing: float
    """Seconds that computing the same tokens would take."""
    due: float
    """When to look whether going on is still the faster way; monotonic seconds."""
    given_up: bool = False

    @property
    def hashes(self) -> list[BlockHash]:
        """The prefixes whose blocks come."""
        return self.chain.hashes[self.start : self.stop]

    def whole(self) -> int:
        """The depth up to which every block is there."""
        outcomes = zip(self.wanted, self.load.outcomes, strict=True)
        return min((depth for (_, depth), outcome in outcomes if outcome is not Outcome.OK), default=self.stop)

    def is_late(self, patience: float) -> bool:
        """Whether computing what has not come is now the faster way, as far as one can see.

        At the rate so far, so the answer may change: it is given again after `patience` seconds. State changes: due.
        """
        now = monotonic()
        if now < self.due:
            return False
        self.due = now + patience
        came = sum(outcome is not None for outcome in self.load.outcomes) / max(1, len(self.load.outcomes))
        return now - self.load.started > self.computing * came

    def give_up(self) -> None:
        """Nobody waits for it any more; its blocks stay pinned until the tiers are done with them."""
        self.given_up = True
        self.load.cancel()

    def loaded(self) -> Loaded:
        """What has come."""
        return Loaded(self.start, self.whole(), dict(self.load.shares))
