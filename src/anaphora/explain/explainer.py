"""Explainer: says of every admitted request what was reused and why the rest was not, and remembers what that takes.

    evicted      a block goes: when, and for whom
    admitted     the pool has answered; what stands in the way is looked up before the request changes anything
    finished     what came of it; whoever listens (the request log) hears of it

Cheap by design: a token that was reused costs nothing, one that has to be computed a few dictionary entries per block,
and text is read only where two prompts part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from anaphora.blocks.hashing import HashChain, block_hash, pack_tokens
from anaphora.blocks.manager import KVCacheManager
from anaphora.blocks.pool import Block
from anaphora.explain.memory import Bounded, Eviction, Evictions, Prefixes
from anaphora.explain.outcome import Cause, Difference, Miss, Outcome
from anaphora.explain.reading import Decode, read_difference
from anaphora.explain.ring import Ring
from anaphora.types import BlockHash, RequestId

NUM_OUTCOMES = 1000
"""Requests that are remembered."""
_PER_BLOCK, _FEWEST, _MOST = 4, 1024, 65536
"""Block names that are remembered: so many for each of the pool's, within bounds (some 300 bytes each)."""


class Prompt(Protocol):
    """What is read of an engine's request."""

    @property
    def request_id(self) -> RequestId: ...
    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def chain(self) -> HashChain: ...
    @property
    def num_cached_tokens(self) -> int | None: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def unloaded_tokens(self) -> int: ...
    @property
    def waited_for(self) -> RequestId | None: ...
    @property
    def reused(self) -> Mapping[str, int]: ...
    @property
    def seconds(self) -> Mapping[str, float]:
        """By source, and since arrival: to admission (queue), to the first token (ttft), until now (e2e)."""


OnFinish = Callable[[Outcome, Sequence[BlockHash]], object]
"""Called with a complete outcome and the hashes of the prompt's full blocks."""


class Explainer:
    """Called on the engine's thread; `outcomes` may be read from any."""

    def __init__(
        self,
        cache: KVCacheManager,
        decode: Decode,
        *,
        block_bytes: int,
        serving: Callable[[], str],
        num_outcomes: int = NUM_OUTCOMES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`decode`: the text of token ids; `serving`: the request that blocks are being taken for.

        Hears of the cache's evictions from now on.
        """
        self.outcomes = Ring(num_outcomes)
        self.keep_text = False
        """Whether the text around a difference is kept."""
        self.on_finish: OnFinish | None = None
        self._cache = cache
        self._serving = serving
        self._decode = decode
        self._block_bytes = block_bytes
        self._clock = clock
        limit = min(max(_PER_BLOCK * cache.num_blocks, _FEWEST), _MOST)
        self._evictions = Evictions(limit)
        self._makers: Bounded[BlockHash, RequestId] = Bounded(limit)
        """Who computed a block last, the partial ones at the end of sequences included."""
        self._prefixes = Prefixes(limit)
        cache.on_evict(self._evicted)

    def _evicted(self, block: Block) -> None:
        node = block.node
        assert node is not None
        self._evictions.note(node.hash, node.above.hash, self._clock(), self._serving())

    def reset(self) -> None:
        """The cache was emptied on purpose: nothing that was computed before counts any more."""
        self._evictions.clear()
        self._makers.clear()
        self._prefixes.clear()

    def admitted(self, prompt: Prompt, running: Iterable[Prompt]) -> Outcome:
        """The request runs from now on, with `num_cached_tokens` reused; `running`: all that run.

        Returns its outcome, which `finished` completes.
        """
        reused, total = prompt.num_cached_tokens or 0, len(prompt.prompt_ids)
        seconds = prompt.seconds
        outcome = Outcome(prompt.request_id, time.time() - seconds["e2e"], total, prompt.reused, seconds)
        outcome.waited_for = prompt.waited_for
        if self._cache.enable_prefix_caching:
            rungs = self._rungs(prompt, reused)
            outcome.miss = self._miss(prompt, running, reused, rungs)
            self._learn(prompt, reused, rungs)
        else:
            outcome.miss = Miss(Cause.CACHING_OFF, 0, total)
        self.outcomes.add(outcome)
        return outcome

    def finished(self, prompt: Prompt, reason: str, pinned_tokens: int) -> None:
        """The request has ended and given its blocks up. One that was never admitted has no outcome."""
        outcome = self.outcomes.get(prompt.request_id)
        if outcome is None:
            return
        outcome.reused, outcome.seconds, outcome.pinned_tokens = prompt.reused, prompt.seconds, pinned_tokens
        outcome.output_tokens = len(prompt.tokens) - len(prompt.prompt_ids)
        outcome.finish_reason = reason
        if self._cache.enable_prefix_caching:
            self._learn_end(prompt)
        if self.on_finish is not None:
            prompt.chain.extend(prompt.prompt_ids)
            self.on_finish(outcome, prompt.chain.hashes[: len(prompt.prompt_ids) // prompt.chain.block_size])

    # Why

    def _miss(
        self, prompt: Prompt, running: Iterable[Prompt], at: int, rungs: Sequence[tuple[int, bytes]]
    ) -> Miss | None:
        missed = len(prompt.prompt_ids) - at
        if missed <= 1:
            return Miss(Cause.BELOW_GRANULARITY, at, missed, known_tokens=missed)
        if prompt.unloaded_tokens:
            return Miss(Cause.LOAD_FAILED, at, missed, min(missed, prompt.unloaded_tokens))
        size, hashes = self._cache.block_size, prompt.chain.hashes
        block = at // size
        gone = self._gone(hashes, block)
        if not gone and (depth := self._cache.depth(prompt.chain)) > block:
            gone = self._gone_below(hashes, depth)
            if not gone:  # it is there, and what must go with it is not: a window's blocks, or room for a copy
                return Miss(Cause.BELOW_GRANULARITY, at, missed, known_tokens=depth * size - at)
        if gone:
            if missed <= size and prompt.reused.keys() - {"pool"}:
                # a tier brings whole blocks, and one token must be left
                return Miss(Cause.BELOW_GRANULARITY, at, missed, known_tokens=missed)
            known = min(missed, len(gone) * size - at % size)
            return self._evicted_miss(prompt.request_id, at, missed, known, gone)
        if (maker := self._computing(prompt, running, at)) is not None:
            return Miss(Cause.IN_PROGRESS, at, missed, min(missed - 1, size - at % size), maker)
        elsewhere = self._prefixes.longest_elsewhere(rungs, prompt.chain.namespace_key)
        if elsewhere is not None and elsewhere[0] * size > at:
            known = elsewhere[0] * size - at
            return Miss(Cause.OTHER_NAMESPACE, at, missed, known, elsewhere[1].request_id)
        return self._diverged(prompt, at, missed) or Miss(Cause.NEVER_SEEN, at, missed)

    def _gone(self, hashes: Sequence[BlockHash], block: int) -> list[Eviction]:
        """The evictions of the blocks from `block` on, as far as they are known without a gap."""
        found = []
        for digest in hashes[block:]:
            eviction = self._evictions.get(digest)
            if eviction is None:
                break
            found.append(eviction)
        return found

    def _gone_below(self, hashes: Sequence[BlockHash], depth: int) -> list[Eviction]:
        """The latest eviction among the first `depth` blocks: one that a sliding window would have to see."""
        known = [eviction for digest in hashes[:depth] if (eviction := self._evictions.get(digest)) is not None]
        return [max(known, key=lambda eviction: eviction.serial)] if known else []

    def _evicted_miss(self, own: RequestId, at: int, missed: int, known: int, gone: Sequence[Eviction]) -> Miss:
        room = self._evictions.room_for(gone, own)
        first = gone[0]
        return Miss(
            Cause.EVICTED,
            at,
            missed,
            known_tokens=known,
            other_request=first.by or None,
            seconds_ago=self._clock() - first.time,
            more_blocks=room,
            more_bytes=room * self._block_bytes,
        )

    def _computing(self, prompt: Prompt, running: Iterable[Prompt], at: int) -> RequestId | None:
        """The running request that has all that could be reused of the block at `at`, which is not findable yet."""
        block, size, key = at // self._cache.block_size, self._cache.block_size, prompt.chain.namespace_key
        start, stop = block * size, min((block + 1) * size, len(prompt.prompt_ids) - 1)
        hashes, part = prompt.chain.hashes[block - 1 : block], prompt.tokens[start:stop]
        for other in running:
            chain = other.chain
            if other is prompt or chain.namespace_key != key or chain.hashes[block - 1 : block] != hashes:
                continue
            if other.tokens[start:stop] == part:
                return other.request_id
        return None

    def _diverged(self, prompt: Prompt, at: int, missed: int) -> Miss | None:
        size = self._cache.block_size
        block, tokens = at // size, prompt.prompt_ids
        beside = self._cache.neighbour(tokens, prompt.chain, block, size) if at else None
        if beside is not None and beside.shared == at and len(beside.tokens) > at - beside.start:

            def theirs(count: int) -> Sequence[int]:
                wider = self._cache.neighbour(tokens, prompt.chain, block, at - block * size + count)
                return wider.tokens[at - wider.start :] if wider is not None else ()

            difference = read_difference(tokens, at, theirs, self._decode, keep_text=self.keep_text)
            return Miss(Cause.DIVERGED, at, missed, 0, self._makers.get(beside.hash), difference=difference)
        if block and (gone := self._evictions.child_of(prompt.chain.hashes[block - 1])) is not None:
            return Miss(Cause.DIVERGED, at, missed, 0, self._makers.get(gone), difference=Difference("unknown", False))
        return None

    # Memory

    def _rungs(self, prompt: Prompt, reused: int) -> list[tuple[int, bytes]]:
        """Of prompts that miss a block or more: the others' prefixes are known already."""
        missed = len(prompt.prompt_ids) - reused
        return self._prefixes.digests(prompt.chain.packed) if missed > self._cache.block_size else []

    def _learn(self, prompt: Prompt, reused: int, rungs: Sequence[tuple[int, bytes]]) -> None:
        self._prefixes.note(rungs, prompt.chain.namespace_key, prompt.request_id)
        for digest in prompt.chain.hashes[reused // self._cache.block_size :]:
            self._makers.put(digest, prompt.request_id)
            self._evictions.discard(digest)

    def _learn_end(self, prompt: Prompt) -> None:
        """The blocks of the output, and the partial one at the end; what was never computed is forgotten."""
        chain, size, computed = prompt.chain, self._cache.block_size, prompt.num_computed_tokens
        full = computed // size
        for digest in chain.hashes[full:]:
            if self._makers.get(digest) == prompt.request_id:
                self._makers.discard(digest)
        for digest in chain.hashes[len(prompt.prompt_ids) // size : full]:
            self._makers.put(digest, prompt.request_id)
        rest = prompt.tokens[full * size : computed]
        if rest and full <= len(chain.hashes):
            parent = chain.hashes[full - 1] if full else chain.root
            self._makers.put(block_hash(chain.start, parent, pack_tokens(rest)), prompt.request_id)
