"""Pool -> RAM -> disk -> remote, driven by a trace: the server's own hierarchy, with stores that only count.

Nothing waits: what the server leaves to a thread is done at once, so no save is dropped and every answer is there.
A block weighs one byte here; sizes are in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from anaphora.blocks.eviction import EvictionPolicy, make_policy
from anaphora.blocks.pool import Block
from anaphora.replay.costs import TIERS, Costs
from anaphora.replay.simulator import PoolReplay
from anaphora.tiers.break_even import LoadSpeed, Run, blocks_to_load
from anaphora.tiers.hierarchy import Hierarchy, Tier
from anaphora.tiers.lanes import Job, Lane
from anaphora.tiers.ram import ENTRY_BYTES, RamTier
from anaphora.tiers.remote.hot import HotKeys
from anaphora.tiers.residents import Entry, Residents
from anaphora.tiers.saving import WritePolicy
from anaphora.tiers.store import BlockMeta, Outcome, Space, TierStats
from anaphora.types import BlockHash

_SPACE = Space(b"\0" * 16, "replay", "count/1")
_ROOT = BlockHash(blake2b(b"root of a replay", digest_size=16).digest())
"""Parent of first blocks."""
_BYTE = memoryview(bytearray(1))
_SPEED = LoadSpeed(0.0, 1e9)


@dataclass(frozen=True, slots=True)
class TierSizes:
    """In blocks; 0: no such tier."""

    ram: int = 0
    disk: int = 0
    remote: int = 0
    write_policy: WritePolicy = WritePolicy.THROUGH
    ram_policy: str | None = None
    """None: as the pool's."""
    disk_policy: str | None = None


class Counted:
    """A store of `capacity` blocks that keeps their names; evicts as RAM and disk do."""

    def __init__(self, name: str, capacity: int, policy: EvictionPolicy[Entry[None]], *, keeps_orphans: bool) -> None:
        self.name = name
        self._capacity = capacity
        self._keeps_orphans = keeps_orphans
        self._residents: Residents[None] = Residents(policy)
        self._stats = TierStats()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._residents.contains(keys)

    def load(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        self.used([block.key for block in blocks])
        found = self.contains([block.key for block in blocks])
        return [Outcome.OK if here else Outcome.MISS for here in found]

    def save(self, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> list[Outcome]:
        return [self._save(block) for block in blocks]

    def discard(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if (entry := self._residents.get(key)) is not None:
                self._residents.remove(entry)

    def used(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if (entry := self._residents.get(key)) is not None:
                self._residents.touch(entry)

    def stats(self) -> TierStats:
        self._stats.blocks = len(self._residents)
        return self._stats

    def close(self) -> None:
        """Nothing is held."""

    def _save(self, block: BlockMeta) -> Outcome:
        residents = self._residents
        if (known := residents.get(block.key)) is not None:
            residents.touch(known)
            return Outcome.OK
        if len(residents) >= self._capacity:
            if residents.make_room(block, orphans=self._keeps_orphans) is None:
                self._stats.dropped += 1
                return Outcome.DROPPED
            self._stats.evicted += 1
        residents.add(Entry(block.key, block.parent, block.depth, None, residents.tick()))
        self._stats.saved += 1
        return Outcome.OK


class _AtOnce(Lane):
    """A lane without threads."""

    def __init__(self, name: str, _threads: int, max_saves: int) -> None:
        super().__init__(name, 0, max_saves)

    def load(self, job: Job) -> bool:
        job()
        return True

    def save(self, job: Job, blocks: int) -> bool:
        job()
        return True


class TieredReplay:
    """A pool of `num_blocks` blocks and the tiers behind it.

    `policy` is the pool's, and that of RAM and disk unless `sizes` says otherwise.
    """

    def __init__(
        self, num_blocks: int, policy: str, sizes: TierSizes, block_size: int, costs: Costs | None = None
    ) -> None:
        costs = costs or Costs()
        self._costs, self._block_size = costs, block_size
        self._hierarchy = _hierarchy(policy, sizes)
        self._names = [tier.store.name for tier in self._hierarchy.tiers]
        self._speeds = [costs.speeds.get(name, _SPEED) for name in self._names]
        self._pool = PoolReplay(num_blocks, make_policy(policy), beyond=self)
        self._metas: list[BlockMeta] = []
        self._loaded: dict[str, int] = {}

    def request(self, blocks: list[BlockHash], arrival: float) -> dict[str, int]:
        """Leading blocks that were there, by source: "pool", then the tiers' names."""
        parents = [_ROOT, *blocks]
        self._metas = [
            BlockMeta(key, parent, b"", depth, _SPACE)
            for depth, (key, parent) in enumerate(zip(blocks, parents, strict=False))
        ]
        self._loaded = {}
        found, loaded = self._pool.request(blocks, arrival)
        hierarchy = self._hierarchy
        if found:
            hierarchy.used(blocks[:found])
        fresh = self._metas[found + loaded : self._pool.pool.num_blocks]
        if fresh:
            hierarchy.computed(fresh, [_BYTE] * len(fresh))
        hierarchy.poll()
        return {"pool": found, **self._loaded}

    @property
    def evictions(self) -> int:
        """Of the pool."""
        return self._pool.pool.evictions

    # What the pool asks

    def fetch(self, missing: Sequence[BlockHash]) -> int:
        start = len(self._metas) - len(missing)
        room = self._pool.pool.num_blocks - start
        lookup = self._hierarchy.lookup(missing[: max(0, room)])
        places = lookup.places[: lookup.prefix()]
        if self._costs.decides and places:
            places = places[: self._worth_loading(places, start)]
        if not places:
            return 0
        wanted = self._metas[start : start + len(places)]
        self._hierarchy.load(wanted, [_BYTE] * len(wanted), places)
        for place in places:
            name = self._names[place]
            self._loaded[name] = self._loaded.get(name, 0) + 1
        return len(places)

    def leave(self, block: Block) -> None:
        node = block.node
        assert node is not None
        parent = node.above
        above = parent.hash if parent.parent is not None else _ROOT
        self._hierarchy.evicted(BlockMeta(node.hash, above, b"", node.depth, _SPACE), _BYTE)

    def _worth_loading(self, places: Sequence[int], start: int) -> int:
        prefill, weight = self._costs.prefill, self._costs.bytes_per_token
        assert prefill is not None
        assert weight is not None
        runs = runs_of(places, self._block_size, self._block_size * weight)
        stop = self._block_size * len(self._metas)
        return blocks_to_load(runs, self._block_size * start, stop, self._speeds, prefill)[0]


def runs_of(places: Sequence[int], block_size: int, block_bytes: int) -> list[Run]:
    """Neighbouring blocks of the same tier, together."""
    runs: list[Run] = []
    for place in places:
        if runs and runs[-1].tier == place:
            last = runs.pop()
            runs.append(Run(place, last.blocks + 1, last.tokens + block_size, last.nbytes + block_bytes))
        else:
            runs.append(Run(place, 1, block_size, block_bytes))
    return runs


def _hierarchy(policy: str, sizes: TierSizes) -> Hierarchy:
    orphans = sizes.write_policy is WritePolicy.ON_EVICTION
    ram, disk = make_policy(sizes.ram_policy or policy), make_policy(sizes.disk_policy or policy)
    tiers = []
    if sizes.ram:
        tiers.append(Tier(RamTier(sizes.ram * (1 + ENTRY_BYTES), 1, ram, keeps_orphans=orphans), 0, _SPEED))
    if sizes.disk:
        tiers.append(Tier(Counted(TIERS[1], sizes.disk, disk, keeps_orphans=orphans), 0, _SPEED))
    if sizes.remote:  # evicts by itself, by age, and asks nobody about parents
        remote = Counted(TIERS[2], sizes.remote, make_policy("lru"), keeps_orphans=True)
        tiers.append(Tier(remote, 0, _SPEED, HotKeys().count))
    return Hierarchy(tiers, sizes.write_policy, lane=_AtOnce)
