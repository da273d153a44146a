"""KVCacheManager against a plain model of storage: reuse is token-exact and never stale, nothing leaks.

Every slot of the model's storage holds what a real slot's KV depends on: (salt, group, all tokens up to and
including its own). So a slot that is right by token but belongs to another prefix is caught too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anaphora.blocks.eviction import POLICIES, EvictionPolicy, PriorityPolicy
from anaphora.blocks.hashing import HashChain, Namespace
from anaphora.blocks.manager import BlockTable, KVCacheManager
from anaphora.blocks.pool import Block
from anaphora.errors import OutOfBlocks
from anaphora.types import NULL_BLOCK, BlockCopy

SALTS = {salt: Namespace("weights", "float32", "layout", "tokenizer", cache_salt=salt).key for salt in ("", "tenant")}
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


class MRU(PriorityPolicy[Block]):
    """The worst order there is: only the pool keeps parents from going before their children."""

    def priority(self, entry: Block) -> float:
        return -entry.last_used


@dataclass
class Running:
    salt: str
    tokens: list[int]
    chain: HashChain
    table: BlockTable
    copies: list[BlockCopy]
    num_computed: int
    stepped: bool = False


class KVCacheMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 24),
        block_size=st.integers(1, 8),
        windows=st.sampled_from([(None,), (None,), (1,), (5,), (None, None), (None, 3), (None, 9), (2, 6)]),
        policy=st.sampled_from([*POLICIES.values(), MRU]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...],
        policy: type[EvictionPolicy[Block]],
        caching: bool,
    ) -> None:
        self.size, self.windows, self.caching = block_size, windows, caching
        self.now = 0.0
        self.kv = KVCacheManager(num_blocks, block_size, windows, policy(), caching, clock=lambda: self.now)
        self.slots: list[list[object]] = [[None] * block_size for _ in range(num_blocks)]
        self.running: list[Running] = []
        self.orphans: list[list[BlockCopy]] = []
        self.seen: list[tuple[str, list[int]]] = []
        """Sequences whose KV was written since the last reset: (salt, tokens)."""

    # What the engine would do

    @rule(data=st.data(), salt=st.sampled_from(list(SALTS)), fresh=TOKENS, cap=st.integers(0, 3))
    def admit(self, data: st.DataObject, salt: str, fresh: list[int], cap: int) -> None:
        tokens = fresh
        extend = data.draw(st.booleans())
        if self.seen and extend:
            base = data.draw(st.sampled_from(self.seen))[1]
            tokens = base[: data.draw(st.integers(0, len(base)))] + fresh
        chain = HashChain(SALTS[salt], self.size)
        before = self.counts()
        match = self.kv.match_prefix(tokens, chain, len(tokens) - cap)
        assert self.counts() == before
        assert match.num_tokens <= max(0, len(tokens) - cap)
        assert match.num_tokens <= max((common(tokens, t) for s, t in self.seen if s == salt), default=0)
        try:
            table, copies = self.kv.open(match)
        except OutOfBlocks:
            assert self.counts() == before
            match = self.kv.match_prefix(tokens, chain, match.num_tokens // self.size * self.size)
            table, copies = self.kv.open(match)
        request = Running(salt, tokens, chain, table, copies, match.num_tokens)
        self.running.append(request)
        assert all(copy.num_tokens == match.num_tokens % self.size for copy in copies)
        if data.draw(st.booleans()):
            self.run_copies(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 12), late_commit=st.booleans())
    def step(self, data: st.DataObject, count: int, late_commit: bool) -> None:
        request = data.draw(st.sampled_from(self.running))
        end = request.num_computed + count
        while len(request.tokens) < end:
            request.tokens.append(data.draw(st.integers(0, 1)))
        before, tables = self.counts(), [list(blocks) for blocks in request.table.groups]
        needed = self.kv.blocks_needed(request.table, end)
        try:
            self.kv.reserve(request.table, end)
        except OutOfBlocks:
            # Sources of a closed table may keep their cached ancestors from going; else the counts decide.
            assert needed > self.kv.num_free + self.kv.num_cached or self.orphans
            assert request.table.groups == tables
            assert self.counts()[1] == before[1]
            return
        assert self.counts()[1] == before[1] + needed
        assert {len(blocks) for blocks in request.table.groups} == {max(len(tables[0]), -(-end // self.size))}
        self.run_copies(request)
        for position in range(request.num_computed, end):
            for group in range(len(self.windows)):
                block = request.table.groups[group][position // self.size]
                self.slots[block][position % self.size] = self.content(request, group, position)
            self.attend(request, position)
        request.num_computed = end
        request.stepped = True
        if late_commit and data.draw(st.booleans()):
            return  # several steps may pass before the next commit
        self.kv.commit(request.table, request.tokens, request.chain, end)
        self.kv.slide(request.table, end)
        self.remember(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), released_first=st.booleans())
    def close(self, data: st.DataObject, released_first: bool) -> None:
        request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        copies = [] if request.stepped else request.copies
        ran = data.draw(st.booleans())
        if copies and ran:
            self.run_copies(request)
            copies = []
        if copies and released_first:
            self.kv.release_copies(copies)  # they never ran
            copies = []
        self.kv.close(request.table, request.tokens, request.chain, request.num_computed)
        if request.stepped:
            self.remember(request)
        if copies:
            self.orphans.append(copies)

    @precondition(lambda self: self.orphans)
    @rule()
    def release_orphans(self) -> None:
        self.kv.release_copies(self.orphans.pop())

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), seconds=st.integers(0, 9), later=st.integers(0, 4))
    def pin(self, data: st.DataObject, seconds: int, later: int) -> None:
        salt, tokens = data.draw(st.sampled_from(self.seen))
        chain = HashChain(SALTS[salt], self.size)
        chain.extend(tokens)
        pinned = self.kv.pin(chain, seconds)
        assert pinned <= len(tokens)
        assert self.kv.num_pinned <= self.kv.num_blocks // 2
        self.now += later

    @rule(really=st.integers(0, 4))
    def reset(self, really: int) -> None:
        if really:
            return
        all_idle = self.kv.reset_prefix_cache()
        assert self.kv.num_cached == 0
        assert all_idle or self.running or self.orphans
        self.seen.clear()
        for request in self.running:
            request.salt = request.salt.partition("#")[0] + "#reset"  # whatever it holds must not be found

    # What must hold

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_invariants()
        held: Counter[int] = Counter()
        for request in self.running:
            for blocks in request.table.groups:
                held.update(block for block in blocks if block != NULL_BLOCK)
            held.update(copy.src for copy in request.copies)
        held.update(copy.src for copies in self.orphans for copy in copies)
        assert self.kv.num_active == len(held)
        assert all(self.kv._pool.ref_cnt(block) == count for block, count in held.items())  # type: ignore[arg-type]
        if not self.caching:
            assert self.kv.num_cached == 0

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for request in self.running:
            self.run_copies(request)
            self.kv.close(request.table, request.tokens, request.chain, request.num_computed)
        for copies in self.orphans:
            self.kv.release_copies(copies)
        self.kv.check_invariants()
        assert self.kv.num_active == 0
        assert self.kv.num_free + self.kv.num_cached == self.kv.num_blocks
        # Everything cached can go: the whole pool is there for whoever needs it.
        table, _ = self.kv.open(self.kv.match_prefix([], HashChain(SALTS[""], self.size), 0))
        groups = len(self.windows)
        self.kv.reserve(table, self.kv.num_blocks // groups * self.size)
        self.kv.close(table, [], HashChain(SALTS[""], self.size), 0)

    # Helpers

    def counts(self) -> tuple[int, int, int, int]:
        return self.kv.num_free, self.kv.num_active, self.kv.num_cached, self.kv.evictions

    def content(self, request: Running, group: int, position: int) -> object:
        return request.salt.partition("#")[0], group, tuple(request.tokens[: position + 1])

    def run_copies(self, request: Running) -> None:
        if not request.copies:
            return
        reads = [self.slots[copy.src][: copy.num_tokens] for copy in request.copies]
        for copy, read in zip(request.copies, reads, strict=True):
            self.slots[copy.dst][: copy.num_tokens] = read
        self.kv.release_copies(request.copies)
        request.copies = []

    def attend(self, request: Running, position: int) -> None:
        """Read what a query at `position` reads: every slot inside the window holds the right prefix."""
        for group, window in enumerate(self.windows):
            start = 0 if window is None else max(0, position - window + 1)
            for p in range(start, position + 1):
                block = request.table.groups[group][p // self.size]
                assert block != NULL_BLOCK, (group, p)
                assert self.slots[block][p % self.size] == self.content(request, group, p)

    def remember(self, request: Running) -> None:
        if "#" not in request.salt:
            self.seen.append((request.salt, request.tokens[: request.num_computed]))


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
