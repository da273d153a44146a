"""Blocks on their way into the pool: who waits for what, and for how long.

A waiting request is asked about once. When its turn comes, either a load begins, and it waits while others run, or
it is computed. While its turn does not come, what lies far is brought into RAM. Waiting is bounded: for an answer by
a share of the time that computing takes, for a load by its own rate.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from anaphora.blocks.manager import KVCacheManager
from anaphora.blocks.matching import PrefixMatch
from anaphora.engine.request import Request
from anaphora.engine.tiering.blocks import PoolBlocks
from anaphora.engine.tiering.loading import Loaded, Loading
from anaphora.engine.tiering.plan import Found, ask
from anaphora.engine.tiering.prefill import PrefillEstimate
from anaphora.errors import OutOfBlocks
from anaphora.tiers.break_even import Run, blocks_to_load
from anaphora.tiers.hierarchy import Hierarchy
from anaphora.tiers.store import Outcome
from anaphora.tiers.transfers import Load
from anaphora.types import BlockHash, RequestId

_PATIENCE = 0.05
"""Of the time that computing takes: so long one waits for an answer that may make it unnecessary."""
_LATE = 0.25
"""Of the same: so much longer than expected a load may take before anybody asks whether it is worth waiting for."""
_LEAST_PATIENCE = 0.002
"""Seconds."""
_PREFETCHES = 2
"""Requests that are prefetched for at a time."""


@dataclass(slots=True, eq=False)
class Ask:
    """What the tiers said about one waiting request, and what was made of it."""

    request: Request
    resumed: bool
    """Whether it ran before, and was preempted."""
    at_once: bool
    """Load whatever is there, without weighing."""
    found: Found | None = None
    until: float = 0.0
    """So long an answer, or a prefetch, is waited for; monotonic seconds."""
    offered: bool = True
    """Whether the last step could have admitted it; if not, there is time to prefetch."""
    prefetch: Load | None = None
    prefetched: dict[BlockHash, tuple[int, int]] = field(default_factory=dict)
    """Key -> (group, depth) of what is, or was, brought into RAM."""
    loading: Loading | None = None
    loaded: Loaded | None = None
    decided: bool = False

    @property
    def pending(self) -> bool:
        return self.prefetch is not None or (self.found is not None and not self.found.lookup.done)

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if self.loading is not None:
            self.loading.give_up()
        if self.prefetch is not None:
            self.prefetch.cancel()


class Inbox:
    """Not thread-safe: the engine's thread calls it."""

    def __init__(
        self, hierarchy: Hierarchy, cache: KVCacheManager, blocks: PoolBlocks, prefill: PrefillEstimate
    ) -> None:
        self.decisions: Counter[str] = Counter()
        """Requests by what was done: nothing (there was nothing), load, part, compute, hung, late."""
        self._hierarchy = hierarchy
        self._cache = cache
        self._blocks = blocks
        self._prefill = prefill
        self._ram = next((i for i, tier in enumerate(hierarchy.tiers) if tier.store.name == "ram"), None)
        self._asks: dict[RequestId, Ask] = {}
        self._loads: dict[Load, Loading] = {}

    @property
    def busy(self) -> bool:
        """Whether blocks of the pool are held for a load."""
        return bool(self._loads)

    def in_flight(self) -> Collection[BlockHash]:
        """See Offload."""
        return {digest for loading in self._loads.values() if not loading.given_up for digest in loading.hashes}

    def patience(self) -> float | None:
        """Seconds until something that is waited for is late; None: nothing is."""
        now = time.monotonic()
        dues = [loading.due for loading in self._loads.values() if not loading.given_up]
        dues += [each.until for each in self._asks.values() if each.pending and not each.decided and each.until > now]
        return max(0.0, min(dues) - now) if dues else None

    def arrived(self, request: Request) -> None:
        """Ask about a request's blocks that the pool has not."""
        match = self._cache.match_prefix(request.tokens, request.chain, len(request.tokens) - 1)
        self._asks[request.request_id] = entry = Ask(request, resumed=False, at_once=False)
        if match.num_tokens == len(request.tokens) - 1:
            return
        start = match.num_tokens // self._cache.block_size
        self._ask(entry, start)
        computing = self._prefill.speed().seconds(start * self._cache.block_size, len(request.tokens))
        entry.until = time.monotonic() + _patience(computing)

    def preempted(self, request: Request, *, at_once: bool) -> None:
        """It will be asked about when its turn comes: until then the pool may still have it."""
        self._asks[request.request_id] = Ask(request, resumed=True, at_once=at_once)

    def forget(self, request_id: RequestId) -> Ask | None:
        """The request waits no longer."""
        return self._asks.pop(request_id, None)

    def undecided(self, request_id: RequestId) -> bool:
        """See Offload."""
        return (entry := self._asks.get(request_id)) is not None and not entry.decided

    def fetch(self, request: Request, match: PrefixMatch, room: int) -> bool:
        """See Offload."""
        entry = self._asks.get(request.request_id)
        if entry is None or entry.decided:
            return False
        entry.offered = True
        size, partly = self._cache.block_size, match.num_tokens
        if partly == len(request.tokens) - 1:
            self.decisions["nothing"] += 1
            entry.decided = True
            return False
        if partly % size:
            match = self._cache.match_prefix(request.tokens, request.chain, partly // size * size)
        start = len(match.nodes)
        if entry.found is None or start < entry.found.start:
            self._ask(entry, start)
        if entry.pending and time.monotonic() < entry.until:
            return True
        stop = self._worth_loading(entry, start, partly)
        if stop == start:
            entry.decided = True
            return False
        if self._cache.blocks_for((stop - start) * size) > room:
            return False  # asked again when there is room
        return self._load(entry, match, stop)

    def over(self, load: Load) -> None:
        """The tiers are done with its blocks: what is whole is findable from now on, the rest is free."""
        if (loading := self._loads.pop(load, None)) is None:
            self._prefetch_over(load)
            return
        loaded = loading.loaded()
        num_tokens = loaded.stop * self._cache.block_size
        self._cache.close(loading.table, loading.tokens, loading.chain, num_tokens)
        self._note(loading, loaded)

    def give_up_late(self) -> None:
        """Of loads that computing has become faster than: what came is findable from now on, the rest is computed."""
        for loading in self._loads.values():
            if not loading.given_up and loading.is_late(_patience(loading.computing)):
                loaded = loading.loaded()
                num_tokens = loaded.stop * self._cache.block_size
                self._cache.commit(loading.table, loading.tokens, loading.chain, num_tokens)
                self.decisions["late"] += 1
                self._note(loading, loaded)
                loading.give_up()

    def prefetch_waiting(self) -> None:
        """For requests that no step could have admitted: bring what is worth loading into RAM. Once a step."""
        running = sum(entry.prefetch is not None for entry in self._asks.values())
        for entry in self._asks.values():
            waits = not (entry.offered or entry.decided or entry.pending or entry.prefetched)
            if waits and self._ram is not None and running < _PREFETCHES:
                running += self._prefetch(entry)
            entry.offered = False

    def cancel_all(self) -> None:
        for loading in self._loads.values():
            loading.give_up()

    # Asking

    def _ask(self, entry: Ask, start: int) -> None:
        """About whole blocks from depth `start` on; of the last one, all tokens but the last can be used."""
        request = entry.request
        request.chain.extend(request.tokens)
        stop = len(request.tokens) // self._cache.block_size
        entry.found = ask(self._hierarchy, self._cache.windows, request.chain, start, max(start, stop))

    def _worth_loading(self, entry: Ask, start: int, partly: int) -> int:
        """The depth to load to. `partly`: tokens the pool has, of which a load uses those of whole blocks."""
        found, size = entry.found, self._cache.block_size
        assert found is not None
        reach = found.reach(start, found.stop)
        runs = list(self._usable(found.runs(start, reach, self._blocks.block_bytes)))
        usable = found.reach(start, start + sum(run.blocks for run in runs))
        if usable == start:
            self.decisions["nothing" if reach == start else "hung"] += 1
            return start
        if entry.at_once:
            self.decisions["load"] += 1
            return usable
        prefill, stop_tokens = self._prefill.speed(), len(entry.request.tokens)
        count, saved = blocks_to_load(runs, start * size, stop_tokens, self._hierarchy.speeds(), prefill)
        stop = found.reach(start, min(usable, start + count))
        if saved <= prefill.seconds(start * size, partly):
            stop = start
        self.decisions["compute" if stop == start else "load" if stop == usable else "part"] += 1
        return stop

    def _usable(self, runs: Sequence[Run]) -> Iterator[Run]:
        """Up to the first tier that a load hangs in."""
        hung = {tier for loading in self._loads.values() if loading.given_up for tier in loading.tiers}
        for run in runs:
            if run.tier in hung:
                return
            yield run

    # Loading

    def _load(self, entry: Ask, match: PrefixMatch, stop: int) -> bool:
        found, request = entry.found, entry.request
        size, start = self._cache.block_size, len(match.nodes)
        assert found is not None
        try:
            table = self._cache.prepare_load(match, request.tokens, request.chain, stop * size)
        except OutOfBlocks:
            return False
        wanted = found.wanted(start, stop)
        places = [found.place(g, d) for g, d in wanted]
        load = self._hierarchy.load(
            [self._blocks.meta(request.chain, d, g) for g, d in wanted],
            [self._blocks.view(table.groups[g][d]) for g, d in wanted],
            places,
        )
        computing = self._prefill.speed().seconds(start * size, stop * size)
        entry.loading = self._loads[load] = Loading(
            tokens=tuple(request.tokens[: stop * size]),
            chain=request.chain,
            table=table,
            start=start,
            stop=stop,
            wanted=wanted,
            tiers=frozenset(places),
            load=load,
            computing=computing,
            due=load.started + self._expected(places) + max(_LEAST_PATIENCE, _LATE * computing),
        )
        entry.decided = True
        return True

    def _expected(self, places: Sequence[int]) -> float:
        """Seconds that loading blocks from there should take."""
        speeds, counts = self._hierarchy.speeds(), Counter(places)
        return max(speeds[tier].seconds(count * self._blocks.block_bytes) for tier, count in counts.items())

    def _note(self, loading: Loading, loaded: Loaded) -> None:
        if not loading.given_up:
            for entry in self._asks.values():
                if entry.loading is loading:
                    entry.loading, entry.loaded = None, loaded
                    entry.request.unloaded_tokens = (loading.stop - loaded.stop) * self._cache.block_size

    # Prefetching

    def _prefetch(self, entry: Ask) -> bool:
        found, chain = entry.found, entry.request.chain
        if found is None or self._ram is None:
            return False
        start, tokens, size = found.start, len(entry.request.tokens), found.block_size
        runs = list(self._usable(found.runs(start, found.reach(start, found.stop), self._blocks.block_bytes)))
        prefill = self._prefill.speed()
        count, _ = blocks_to_load(runs, start * size, tokens, self._hierarchy.speeds(), prefill)
        far = [(g, d) for g, d in found.wanted(start, start + count) if found.place(g, d) > self._ram]
        if not far:
            return False
        metas, places = [self._blocks.meta(chain, d, g) for g, d in far], [found.place(g, d) for g, d in far]
        entry.prefetched = {meta.key: place for meta, place in zip(metas, far, strict=True)}
        entry.prefetch = self._hierarchy.prefetch(metas, places)
        if entry.prefetch is not None:
            patience = _patience(prefill.seconds(start * size, (start + count) * size))
            entry.until = time.monotonic() + self._expected(places) + patience
        return entry.prefetch is not None

    def _prefetch_over(self, load: Load) -> None:
        for entry in self._asks.values():
            if entry.prefetch is load:
                entry.prefetch = None
                for meta, outcome in zip(load.blocks, load.outcomes, strict=True):
                    if outcome is Outcome.OK and entry.found is not None and self._ram is not None:
                        entry.found.moved(*entry.prefetched[meta.key], self._ram)


def _patience(computing: float) -> float:
    return max(_LEAST_PATIENCE, _PATIENCE * computing)
