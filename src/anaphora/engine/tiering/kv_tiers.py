"""KVTiers: the pool's way to the tiers and back. Everything here runs on the engine's thread, between steps.

a request arrives     one question about the blocks that the pool has not
its turn comes        a load of what is there sooner than computed; it waits, others run          inbox.py
its turn is far       what lies far is brought into RAM meanwhile
blocks become whole   they are sent to the tiers (write-through), or when the pool evicts them    outbox.py
it is preempted       they are sent to RAM, and asked for again when its turn comes
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict

from anaphora.blocks.manager import KVCacheManager
from anaphora.blocks.matching import PrefixMatch
from anaphora.engine.batch import Batch
from anaphora.engine.config import Preemption
from anaphora.engine.request import Request
from anaphora.engine.tiering.blocks import PoolBlocks
from anaphora.engine.tiering.inbox import Inbox
from anaphora.engine.tiering.loading import Loaded
from anaphora.engine.tiering.outbox import Outbox
from anaphora.engine.tiering.prefill import PrefillEstimate
from anaphora.tiers.hierarchy import Hierarchy
from anaphora.tiers.store import group_key
from anaphora.tiers.transfers import Save
from anaphora.types import BlockHash

_SETTLE_SECONDS = 0.02


class Bell:
    """Rung on any thread when a transfer is over; whoever sleeps until then is its listener."""

    def __init__(self) -> None:
        self.listener: Callable[[], None] = lambda: None

    def ring(self) -> None:
        self.listener()


class KVTiers:
    """See Offload."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        cache: KVCacheManager,
        blocks: PoolBlocks,
        bell: Bell,
        *,
        write_through: bool,
        preemption: Preemption,
    ) -> None:
        """`blocks` are those of `cache`, which tells us of evictions from now on."""
        self.bell = bell
        self._prefill = PrefillEstimate()
        self._hierarchy = hierarchy
        self._cache = cache
        self._write_through = write_through
        self._preemption = preemption
        self._inbox = Inbox(hierarchy, cache, blocks, self._prefill)
        self._outbox = Outbox(hierarchy, cache, blocks)
        if not write_through:
            cache.on_evict(self._outbox.evicted)

    # Offload

    def poll(self) -> None:
        self._transfers_over()
        self._inbox.give_up_late()
        self._inbox.prefetch_waiting()

    def arrived(self, request: Request) -> None:
        self._inbox.arrived(request)

    def in_flight(self) -> Collection[BlockHash]:
        return self._inbox.in_flight()

    def undecided(self, request: Request) -> bool:
        return self._inbox.undecided(request.request_id)

    def fetch(self, request: Request, match: PrefixMatch, room: int) -> bool:
        return self._inbox.fetch(request, match, room)

    def admitted(self, request: Request, match: PrefixMatch) -> None:
        entry = self._inbox.forget(request.request_id)
        self._outbox.begin(request, len(match.nodes))
        loaded = entry.loaded if entry is not None else None
        if loaded is not None and entry is not None and not entry.resumed:
            _attribute(request, loaded, match.num_tokens, self._cache.block_size)
        come = range(loaded.start, loaded.stop) if loaded is not None else range(0)
        old = [node.hash for node in match.nodes if node.depth not in come]
        if old:
            self._hierarchy.used([group_key(each, group) for each in old for group in range(len(self._cache.windows))])

    def computed(self, request: Request) -> None:
        if self._write_through:
            self._outbox.computed(request)

    def preempted(self, request: Request) -> None:
        self.computed(request)
        self._outbox.forget(request.request_id)
        if self._preemption == "recompute":
            return
        at_once = self._preemption == "swap"
        self._outbox.swap_out(request, None if at_once else self._prefill.speed())
        self._inbox.preempted(request, at_once=at_once)

    def finished(self, request: Request) -> None:
        if request.table is not None:
            self.computed(request)
        self._outbox.forget(request.request_id)
        if (entry := self._inbox.forget(request.request_id)) is not None:
            entry.cancel()

    def settle(self) -> bool:
        end, active = time.monotonic() + _SETTLE_SECONDS, self._cache.num_active
        while self._outbox.busy and time.monotonic() < end:
            self._transfers_over()
            if self._cache.num_active < active:
                return True
            time.sleep(0.0005)
        return False

    # For the engine

    @property
    def busy(self) -> bool:
        """Whether blocks of the pool are held for transfers."""
        return self._inbox.busy or self._outbox.busy

    def observe(self, batch: Batch, seconds: float) -> None:
        """A step was computed in that time."""
        self._prefill.observe(batch, seconds)

    def patience(self) -> float | None:
        """Seconds until something that is waited for is late; None: nothing is."""
        return self._inbox.patience()

    def wait(self, seconds: float) -> bool:
        """Until all transfers are over, so long at most; whether they are. It blocks: for tests and benchmarks."""
        over = self._hierarchy.drain(seconds)
        self._transfers_over()
        return over

    def close(self, seconds: float) -> None:
        """Finish what is queued, within that time, and close the tiers. It blocks."""
        self._inbox.cancel_all()
        self._hierarchy.close(seconds)
        self._transfers_over()

    @property
    def decisions(self) -> Mapping[str, int]:
        """Requests by what was done about them; see docs/tiers.md."""
        return self._inbox.decisions

    @property
    def prefill_seconds(self) -> float:
        """What computing a token of a prompt is expected to take, attention left out."""
        return self._prefill.speed().per_token

    def snapshot(self) -> Mapping[str, Mapping[str, float]]:
        """Numbers of every tier, by its name; of one that could not be opened only `up`, 0. Thread-safe."""
        stats = self._hierarchy.stats()
        tiers: dict[str, Mapping[str, float]] = {name: {"up": 0.0} for name in stats.unavailable}
        for name, tier in stats.tiers.items():
            numbers = {key: float(value) for key, value in asdict(tier).items() if not isinstance(value, str)}
            (loads, saves), speed = stats.waiting[name], stats.speeds[name]
            tiers[name] = numbers | {
                "up": float(not tier.off),
                "behind": float(stats.behind[name]),
                "loads_waiting": float(loads),
                "saves_waiting": float(saves),
                "latency": speed.latency,
                "bandwidth": speed.bandwidth,
            }
        return tiers

    def _transfers_over(self) -> None:
        for transfer in self._hierarchy.poll():
            if isinstance(transfer, Save):
                self._outbox.over(transfer)
            else:
                self._inbox.over(transfer)


def _attribute(request: Request, loaded: Loaded, num_matched: int, block_size: int) -> None:
    """Of the tokens found in the pool, those that the load brought are its tiers'."""
    tokens = min(loaded.stop * block_size, num_matched) - loaded.start * block_size
    for name, part, seconds in loaded.split(max(0, tokens)):
        request.sources.take_from_pool(name, part, seconds)
