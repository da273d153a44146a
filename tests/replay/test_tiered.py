"""Pool, RAM, disk and remote over a trace: the server's hierarchy, its stores counting only."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from anaphora.blocks.eviction import make_policy
from anaphora.replay.costs import Costs
from anaphora.replay.readers.base import TraceRequest
from anaphora.replay.runs import Job, run, run_all
from anaphora.replay.simulator import PoolReplay
from anaphora.replay.spool import spooled
from anaphora.replay.synthetic import chat, mixed
from anaphora.replay.tiered import Counted, TieredReplay, TierSizes
from anaphora.tiers.break_even import LoadSpeed, PrefillSpeed
from anaphora.tiers.ram import ENTRY_BYTES, RamTier
from anaphora.tiers.saving import WritePolicy
from anaphora.tiers.store import BlockMeta, Outcome, Space
from anaphora.types import BlockHash

ON_EVICTION = WritePolicy.ON_EVICTION


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def hits(
    prompts: Sequence[Sequence[int]], pool: int, sizes: TierSizes, costs: Costs | None = None
) -> list[dict[str, int]]:
    tiered = TieredReplay(pool, "lru", sizes, 16, costs)
    return [tiered.request([name(i) for i in prompt], float(n)) for n, prompt in enumerate(prompts)]


def test_what_the_pool_evicts_comes_back_from_the_nearest_tier_that_has_it() -> None:
    a, b, c = [1, 2], [3, 4], [5, 6]
    # Write-through: RAM holds what was computed last, the disk everything.
    found = hits([a, b, c, c, b, a], 2, TierSizes(ram=4, disk=10))
    assert found == [{"pool": 0}, {"pool": 0}, {"pool": 0}, {"pool": 2}, {"pool": 0, "ram": 2}, {"pool": 0, "disk": 2}]
    # a was promoted into RAM
    assert hits([a, b, c, a, c, a], 2, TierSizes(ram=4, disk=10))[3:] == [
        {"pool": 0, "disk": 2},
        {"pool": 0, "ram": 2},
        {"pool": 0, "ram": 2},
    ]


def test_each_tier_evicts_by_its_own_policy() -> None:
    """LFU keeps what was used twice, LRU what was used last; by default both are the pool's."""
    a, b, c = [1, 2], [3, 4], [5, 6]
    order = [a, b, a, c, a, b, c, b]
    by_age, by_uses = TierSizes(ram=4), TierSizes(ram=4, ram_policy="lfu")
    assert hits(order, 2, by_age) == hits(order, 2, TierSizes(ram=4, ram_policy="lru", disk_policy="lfu"))
    assert hits(order, 2, by_uses) != hits(order, 2, by_age)
    on_disk = [hits(order, 2, TierSizes(disk=4, disk_policy=policy)) for policy in (None, "lru", "lfu")]
    assert on_disk[0] == on_disk[1] != on_disk[2]


def test_written_on_eviction_ram_holds_what_the_pool_does_not() -> None:
    a, b = [1, 2], [3, 4]
    assert hits([a, b, a], 2, TierSizes(ram=2))[2] == {"pool": 0}  # RAM held b, as the pool
    found = hits([a, b, a], 2, TierSizes(ram=8, write_policy=ON_EVICTION))
    assert found[2] == {"pool": 0, "ram": 2}


def test_a_remote_alone_and_a_part_of_a_prompt() -> None:
    found = hits([[1, 2, 3], [4, 5, 6], [1, 2, 7]], 3, TierSizes(remote=20))
    assert found[2] == {"pool": 0, "remote": 2}


def test_a_prompt_longer_than_the_pool_loads_what_fits() -> None:
    found = hits([[1, 2, 3, 4, 5], [9, 8], [1, 2, 3, 4, 5]], 3, TierSizes(ram=50))
    assert found[2] == {"pool": 1, "ram": 2}  # lru gave up the two deepest for 9 and 8


@pytest.mark.parametrize(("bandwidth", "source"), [(1e12, 2), (1.0, 0)])
def test_a_tier_slower_than_computing_is_not_read(bandwidth: float, source: int) -> None:
    costs = Costs(PrefillSpeed(1e-3), 1000, {"ram": LoadSpeed(1e-6, bandwidth)})
    found = hits([[1, 2], [3, 4], [1, 2]], 2, TierSizes(ram=10), costs)
    assert found[2].get("ram", 0) == source


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_endless_tiers_hit_what_an_endless_pool_does(policy: str) -> None:
    requests = list(mixed(400, 3))
    endless, sizes = PoolReplay(50_000, make_policy(policy)), TierSizes(ram=50_000)
    tiered = TieredReplay(300, policy, sizes, 512)
    for request in requests:
        blocks = request.blocks(512)[:300]
        assert sum(tiered.request(blocks, request.arrival).values()) == endless.request(blocks)[0]


def test_the_counting_store_evicts_as_the_ram_tier_does() -> None:
    for orphans in (False, True):
        capacity = 40
        ram = RamTier(capacity * (1 + ENTRY_BYTES), 1, make_policy("lru"), keeps_orphans=orphans)
        counted = Counted("disk", capacity, make_policy("lru"), keeps_orphans=orphans)
        random, space = Random(5), Space(bytes(16), "m", "c")
        byte = [memoryview(bytearray(1))]
        for _ in range(4000):
            chain, depth = random.randrange(12), random.randrange(8)
            parent = name(1000 * chain + depth - 1) if depth else name(0)
            meta = [BlockMeta(name(1000 * chain + depth), parent, b"", depth, space)]
            kind = random.randrange(3)
            if kind == 0:
                assert ram.load(meta, byte) == counted.load(meta, byte)
            elif kind == 1:
                ram.used([meta[0].key])
                counted.used([meta[0].key])
            else:
                assert ram.save(meta, byte) == counted.save(meta, byte)
            keys = [name(1000 * c + d) for c in range(12) for d in range(8)]
            assert ram.contains(keys) == counted.contains(keys)
        assert counted.load([BlockMeta(name(7), name(0), b"", 0, space)], byte) == [Outcome.MISS]
        assert counted.stats().evicted == ram.stats().evicted > 0


def test_a_prompt_as_large_as_the_pool_is_found_again() -> None:
    pool = PoolReplay(2, make_policy("lru"))
    blocks = [[name(2 * n), name(2 * n + 1)] for n in range(3)]
    assert [pool.request(blocks[n]) for n in (0, 1, 1, 2, 2)] == [(0, 0), (0, 0), (2, 0), (0, 0), (2, 0)]


def trace(number: int = 300) -> list[TraceRequest]:
    return list(chat(number, 1))


def test_processes_measure_what_one_does_and_lru_s_run_equals_its_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    from anaphora.replay.lru_curve import lru_curve

    jobs = [Job("lru", 50), Job("lru", 400), Job("hazard", 200), Job("optimum", 200), Job("none", 1)]
    costs = Costs(PrefillSpeed(1e-4, 1e-9), 1000)
    with spooled(iter(trace()), 16) as spool:
        alone = run_all(spool, jobs, costs, 1, lambda done, total: None)
        monkeypatch.setattr("anaphora.replay.runs._ALONE", 0)
        seen: list[tuple[int, int]] = []
        many = run_all(spool, jobs, costs, 2, lambda done, total: seen.append((done, total)))
    assert seen == [(n, 5) for n in range(6)]
    assert {job: found.hit_blocks for job, found in many.items()} == {
        job: found.hit_blocks for job, found in alone.items()
    }
    curve = lru_curve(trace())
    for size in (50, 400):
        found = alone[Job("lru", size)]
        assert (found.blocks, found.tokens) == curve.hits(size)
    nothing = alone[Job("none", 1)]
    assert nothing.tokens == 0
    assert nothing.computing == pytest.approx(
        sum(1e-4 * r.input_length + 1e-9 * r.input_length**2 / 2 for r in trace())
    )
    assert nothing.computing > alone[Job("lru", 400)].computing > 0
    assert nothing.ttft.at(0.5) == pytest.approx(
        _median(1e-4 * r.input_length + 1e-9 * r.input_length**2 / 2 for r in trace()), rel=0.03
    )


def _median(values: object) -> float:
    found = sorted(values)  # type: ignore[call-overload]
    return float(found[(len(found) - 1) // 2])


def test_a_run_by_tiers_counts_tokens_once() -> None:
    sizes = TierSizes(ram=200, disk=400, remote=1000, write_policy=ON_EVICTION)
    costs = Costs(PrefillSpeed(1e-3), 1, {tier: LoadSpeed(0.0, 1e9) for tier in ("ram", "disk", "remote")})
    with spooled(chat(300, 1, think=8.0), 16) as spool:
        found = run(spool, Job("lru", 50, sizes), costs)
        endless = run(spool, Job("lru", 100_000), costs)
    assert set(found.hit_blocks) == {"pool", "ram", "disk", "remote"}
    assert found.hit_blocks["pool"] < found.blocks <= endless.blocks
    assert found.tokens <= endless.tokens
    assert found.loading > 0
