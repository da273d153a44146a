"""KVCacheManager: block tables over one pool, with token-exact prefix reuse.

The life of a table:

    match_prefix -> open -> (copies run) release_copies -> { reserve -> step -> commit -> slide } -> close
                 `> prepare_load -> (a tier fills the blocks) -> { commit } -> close
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from anaphora.blocks.eviction import LRU, EvictionPolicy
from anaphora.blocks.hashing import HashChain
from anaphora.blocks.matching import PrefixMatch, first_visible, longest_match
from anaphora.blocks.neighbours import Neighbour, nearest_neighbour
from anaphora.blocks.pool import Block, BlockPool
from anaphora.blocks.publishing import Publisher
from anaphora.blocks.table import BlockTable
from anaphora.errors import BlockStateError, ConfigError, OutOfBlocks
from anaphora.types import NULL_BLOCK, BlockCopy, BlockId, TokenIds

__all__ = ["BlockTable", "KVCacheManager", "PrefixMatch"]


class KVCacheManager:
    """Hands blocks to requests and finds what earlier ones computed. Not thread-safe: one engine thread owns it.

    `windows` has one entry per cache group: None = full attention, w = a query at position p sees the
    positions > p - w, itself included. At most `max_pinned_share` of the blocks may be pinned; `clock` gives the
    seconds of pins. Raises ConfigError for sizes that are not positive, or a share outside 0 .. 1.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int | None],
        policy: EvictionPolicy[Block] | None = None,
        enable_prefix_caching: bool = True,
        max_pinned_share: float = 0.5,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        if not windows or min(num_blocks, block_size, *(w for w in windows if w is not None)) < 1:
            raise ConfigError(
                f"num_blocks={num_blocks}, block_size={block_size}, windows={list(windows)}: "
                "each must be at least 1, for at least one cache group. Give the KV cache more memory"
            )
        if not 0 <= max_pinned_share <= 1:
            raise ConfigError(f"max_pinned_share={max_pinned_share} must lie in 0 .. 1; 0 pins nothing")
        self.block_size = block_size
        self.windows = tuple(windows)
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(
            num_blocks,
            [w is None for w in windows],
            policy if policy is not None else LRU(),
            max_pinned=int(num_blocks * max_pinned_share),
            clock=clock,
        )
        self._index = self._pool.prefixes
        self._publisher = Publisher(self._pool, self.windows, block_size)
        self._windowed = [(g, w) for g, w in enumerate(windows) if w is not None]

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_active(self) -> int:
        return self._pool.num_active

    @property
    def num_cached(self) -> int:
        return self._pool.num_cached

    @property
    def evictions(self) -> int:
        """Cached blocks given up to make room, since the start."""
        return self._pool.evictions

    @property
    def num_pinned(self) -> int:
        return self._pool.num_pinned

    def match_prefix(self, tokens: TokenIds, chain: HashChain, max_tokens: int) -> PrefixMatch:
        """The longest prefix of `tokens`, at most `max_tokens`, whose KV is cached in every group, to the token.

        Changes nothing but the chain, which is extended. Every token of the answer was compared. A windowed
        group needs only the blocks that cover [num_tokens - window + 1, num_tokens).
        """
        limit = min(max_tokens, len(tokens))
        if not self.enable_prefix_caching or limit < 1:
            return PrefixMatch.EMPTY
        self._check_chain(chain)
        chain.extend(tokens)
        return longest_match(self._index, self.windows, tokens, chain, limit)

    def depth(self, chain: HashChain) -> int:
        """Leading blocks of the chain that some cache group has, or that others hang below. Changes nothing."""
        root = self._index.find_root(chain)
        return 0 if root is None else len(self._index.walk(root, chain, len(chain.hashes)))

    def neighbour(self, tokens: TokenIds, chain: HashChain, num_blocks: int, span: int) -> Neighbour | None:
        """What is cached beside the first `num_blocks` blocks of a sequence; see neighbours.py. Changes nothing."""
        return nearest_neighbour(self._index, tokens, chain, num_blocks, span)

    def open(self, match: PrefixMatch) -> tuple[BlockTable, list[BlockCopy]]:
        """Pin the matched blocks and give each group a fresh block for the partial run, if there is one.

        Returns the table, covering match.num_tokens, and the copies to run before its first step; their sources
        stay pinned until `release_copies`. Raises OutOfBlocks (nothing changed; a match of whole blocks always
        opens: ask for one with max_tokens at a block border) and BlockStateError when the match is out of date.
        """
        nodes, depth = match.nodes, len(match.nodes)
        first = [min(first_visible(match.num_tokens, window, self.block_size), depth) for window in self.windows]
        shared = [[node.blocks[g] for node in nodes[skip:]] for g, skip in enumerate(first)]
        sources = list(match.source.blocks) if match.source is not None else []
        pins = [block for blocks in shared for block in blocks] + sources
        if NULL_BLOCK in pins or (nodes and nodes[-1] not in self._index):
            raise BlockStateError("the prefix match is out of date: blocks moved since; match again before open()")
        fresh = self._pin_and_allocate(pins, len(sources))

        run = match.num_tokens - depth * self.block_size
        copies = [BlockCopy(src, dst, run) for src, dst in zip(sources, fresh, strict=True)]
        groups = [[NULL_BLOCK] * skip + blocks for skip, blocks in zip(first, shared, strict=True)]
        for blocks, block in zip(groups, fresh, strict=False):
            blocks.append(block)
        tip = nodes[-1] if nodes else None
        if tip is not None:
            self._index.pin(tip)
        table = BlockTable(groups, first, [depth] * len(groups), list(nodes), tip, self._index.epoch)
        return table, copies

    def release_copies(self, copies: Sequence[BlockCopy]) -> None:
        """Unpin the sources of copies that ran, or never will; each copy that `open` gave, once.

        Raises BlockStateError when a source has no holder any more.
        """
        for copy in copies:
            node = self._pool.node(copy.src)
            self._pool.release(copy.src)
            if node is not None:
                self._publisher.drop_if_covered(node)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of a table that covers positions < num_tokens in every group."""
        return -(-num_tokens // self.block_size) * len(self.windows)

    def blocks_needed(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks `reserve` would allocate for the same arguments."""
        return max(0, self.blocks_for(num_tokens) - len(table.groups[0]) * len(table.groups))

    def reserve(self, table: BlockTable, num_tokens: int) -> None:
        """Cover positions < num_tokens in every group. Raises OutOfBlocks; then nothing changed."""
        self._check_open(table)
        fresh = self._pool.allocate(self.blocks_needed(table, num_tokens))
        per_group = len(fresh) // len(table.groups)
        for group, blocks in enumerate(table.groups):
            blocks += fresh[group * per_group : (group + 1) * per_group]

    def prepare_load(self, match: PrefixMatch, tokens: TokenIds, chain: HashChain, num_tokens: int) -> BlockTable:
        """Pin a match of whole blocks, and blocks for the tokens up to `num_tokens`, a multiple of the block size.

        Somebody else fills those; nothing of them is findable before `commit` or `close` says how far they are
        whole. A windowed group gets only what a query at `num_tokens` sees. Raises OutOfBlocks (nothing changed).
        """
        table, _ = self.open(match)
        depth, stop = len(match.nodes), num_tokens // self.block_size
        firsts = [max(depth, first_visible(num_tokens, window, self.block_size)) for window in self.windows]
        try:
            fresh = iter(self._pool.allocate(sum(stop - first for first in firsts)))
        except OutOfBlocks:
            self.close(table, tokens, chain, 0)
            raise
        for blocks, first in zip(table.groups, firsts, strict=True):
            blocks += [NULL_BLOCK] * (first - depth)
            blocks += [next(fresh) for _ in range(first, stop)]
        return table

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """One more holder of each of these active blocks, until `let_go`: a tier reads them."""
        for block in blocks:
            self._pool.hold(block)

    def let_go(self, blocks: Sequence[BlockId]) -> None:
        """Undo one `hold`. The last go first, so that a policy of age takes tails before heads."""
        for block in reversed(blocks):
            self._pool.release(block)

    def on_evict(self, listener: Callable[[Block], object]) -> None:
        """`listener` hears of every block that is evicted, while it can still be read."""
        self._pool.evict_listeners.append(listener)

    def commit(self, table: BlockTable, tokens: TokenIds, chain: HashChain, num_computed: int) -> None:
        """Make every full block of the first `num_computed` tokens findable; called after a step has written them.

        Content another request already made findable is left to it; ours stays unindexed, and in full-attention
        groups what follows it too, until `close`.
        """
        self._check_open(table)
        if self._may_publish(table):
            self._check_computed(table, tokens, chain, num_computed)
            self._publisher.full_blocks(table, tokens, chain, num_computed, closing=False)

    def slide(self, table: BlockTable, num_computed: int) -> None:
        """Release the blocks of windowed groups that no query at a position >= num_computed sees any more.

        Call it after `commit`: what is findable stays cached, the rest becomes free.
        """
        self._check_open(table)
        for group, window in self._windowed:
            blocks = table.groups[group]
            stop = min(first_visible(num_computed, window, self.block_size), len(blocks))
            for i in range(table.first[group], stop):
                self._pool.release(blocks[i])
                blocks[i] = NULL_BLOCK
            table.first[group] = max(table.first[group], stop)

    def close(self, table: BlockTable, tokens: TokenIds, chain: HashChain, num_computed: int) -> None:
        """Make full blocks and the partial tail of the first `num_computed` tokens findable, then release all.

        The tail is released first, so LRU takes tails before heads. Nothing new is indexed after a reset since
        `open`, or with caching disabled. A table whose copies never ran is closed before, or right after, they
        are released: while its source is there, that is the entry for those tokens, and ours is not indexed.
        """
        self._check_open(table)
        if self._may_publish(table):
            self._check_computed(table, tokens, chain, num_computed)
            self._publisher.full_blocks(table, tokens, chain, num_computed, closing=True)
            self._publisher.partial_tail(table, tokens, chain, num_computed)
        for i in range(len(table.groups[0]) - 1, -1, -1):
            for blocks in table.groups:
                if blocks[i] != NULL_BLOCK:
                    self._pool.release(blocks[i])
        if table.tip is not None and table.epoch == self._index.epoch:
            self._index.unpin(table.tip)
        table.closed = True
        table.groups = [[] for _ in table.groups]
        table.path = []

    def pin(self, chain: HashChain, seconds: float) -> int:
        """Keep the findable blocks of the chain's full blocks for that long; returns the tokens they hold.

        From the head on, every group; it ends at the first block that no group has, or when as many blocks are
        pinned as may be. A pinned block goes only when nothing else can.
        """
        self._check_chain(chain)
        root, count = self._index.find_root(chain), 0
        path = self._index.walk(root, chain, len(chain.hashes)) if root is not None else []
        for node in path:
            blocks = [block for block in node.blocks if block != NULL_BLOCK]
            if not blocks or not all(self._pool.pin(block, seconds) for block in blocks):
                break
            count += 1
        return count * self.block_size

    def reset_prefix_cache(self) -> bool:
        """Nothing computed before this call will ever be matched again.

        Cached blocks become free. Indexed blocks that requests hold lose their entry; the requests run on, and
        their tables index nothing any more. Returns False when there were such blocks.
        """
        return self._pool.reset()

    def check_invariants(self) -> None:
        """Raises BlockStateError when blocks, index, policy and counts disagree. O(pool)."""
        self._pool.check_invariants()

    def _pin_and_allocate(self, pins: list[BlockId], count: int) -> list[BlockId]:
        pool = self._pool
        idle = sum(pool.ref_cnt(block) == 0 for block in pins) if count else 0
        if count > pool.num_free + pool.num_cached - idle:
            raise pool.out_of_blocks(count)
        for block in pins:
            pool.acquire(block)
        try:
            return pool.allocate(count)
        except OutOfBlocks:
            for block in reversed(pins):
                pool.release(block)
            raise

    def _may_publish(self, table: BlockTable) -> bool:
        return self.enable_prefix_caching and table.epoch == self._index.epoch

    @staticmethod
    def _check_open(table: BlockTable) -> None:
        if table.closed:
            raise BlockStateError("the block table is closed; open a new one")

    def _check_computed(self, table: BlockTable, tokens: TokenIds, chain: HashChain, num_computed: int) -> None:
        self._check_chain(chain)
        if num_computed > min(len(tokens), len(table.groups[0]) * self.block_size):
            raise BlockStateError(
                f"{num_computed} tokens cannot be computed: there are {len(tokens)}, in {len(table.groups[0])} blocks"
            )

    def _check_chain(self, chain: HashChain) -> None:
        if chain.block_size != self.block_size:
            raise BlockStateError(f"the chain's blocks have {chain.block_size} tokens, the cache's {self.block_size}")
