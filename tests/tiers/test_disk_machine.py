"""A random program of save, load, discard, restart and damage, against a model of the store."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from anaphora.blocks.eviction import LRU
from anaphora.tiers.disk import DiskTier
from anaphora.tiers.store import BlockMeta, Outcome
from support.stored_blocks import OTHER_SPACE, SPACE, chain, payload, room

LIMIT = 200_000
SIZES = {SPACE: 6000, OTHER_SPACE: 12_288}


class Store(RuleBasedStateMachine):
    """`stored`: what may be found. A block not in it must never be; one in it may have been evicted or damaged."""

    blocks: Bundle[BlockMeta] = Bundle("blocks")

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.tier = DiskTier(self.folder, LIMIT, LRU())
        self.stored: dict[bytes, BlockMeta] = {}
        self.damaged = False

    @rule(target=blocks, name=st.integers(0, 5), depth=st.integers(0, 4), space=st.sampled_from([SPACE, OTHER_SPACE]))
    def name_block(self, name: int, depth: int, space: object) -> BlockMeta:
        space = SPACE if space is SPACE else OTHER_SPACE
        return chain((name, space.model), depth + 1, space=space)[depth]

    @rule(block=blocks)
    def save(self, block: BlockMeta) -> None:
        evicted = self.tier.stats().evicted
        (outcome,) = self.tier.save([block], [payload(block, SIZES[block.space])])
        assert outcome in (Outcome.OK, Outcome.DROPPED)
        assert self.tier.contains([block.key]) == [outcome is Outcome.OK]
        if outcome is Outcome.OK:
            self.stored[block.key] = block
        if self.tier.stats().evicted == evicted and not self.damaged:
            self.all_here()
        else:
            self.forget_what_left()

    @rule(blocks=st.lists(blocks, max_size=6))
    def load(self, blocks: list[BlockMeta]) -> None:
        into = [room(1, SIZES[block.space])[0] for block in blocks]
        here = self.tier.contains([block.key for block in blocks])
        outcomes = self.tier.load(blocks, into)
        for block, found, outcome, view in zip(blocks, here, outcomes, into, strict=True):
            if outcome is Outcome.OK:
                assert block.key in self.stored
                assert view == payload(block, SIZES[block.space])
            else:
                assert not found or self.damaged
                assert self.tier.contains([block.key]) == [False]
        self.forget_what_left()

    @rule(block=blocks)
    def discard(self, block: BlockMeta) -> None:
        self.tier.discard([block.key])
        self.stored.pop(block.key, None)
        assert self.tier.contains([block.key]) == [False]

    @rule()
    def restart(self) -> None:
        """As after a kill: nothing is flushed that was not written already."""
        self.tier.close()
        self.tier = DiskTier(self.folder, LIMIT, LRU())
        if not self.damaged:
            self.all_here()
        self.forget_what_left()

    @rule(which=st.integers(0, 9), at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def corrupt(self, which: int, at: float, bit: int) -> None:
        files = sorted(self.folder.glob("seg-*.kv"))
        if not files:
            return
        file = files[which % len(files)]
        where = int(at * file.stat().st_size)
        with file.open("r+b") as raw:
            raw.seek(where)
            byte = raw.read(1)[0]
            raw.seek(where)
            raw.write(bytes([byte ^ 1 << bit]))
        self.damaged = True

    @invariant()
    def limit_and_counts(self) -> None:
        if hasattr(self, "tier"):
            self.tier.check_invariants()
            assert sum(file.stat().st_size for file in self.folder.iterdir()) <= LIMIT

    def all_here(self) -> None:
        assert self.tier.contains(list(self.stored)) == [True] * len(self.stored)

    def forget_what_left(self) -> None:
        here = self.tier.contains(list(self.stored))
        self.stored = {key: block for (key, block), found in zip(self.stored.items(), here, strict=True) if found}

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            shutil.rmtree(self.folder)


Store.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestStore = Store.TestCase
