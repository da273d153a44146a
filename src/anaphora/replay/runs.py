"""One cache over one trace, and many of them side by side in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from signal import SIG_IGN, SIGINT, signal

from anaphora.blocks.eviction import make_policy
from anaphora.errors import InputError
from anaphora.replay.costs import TIERS, Costs, Quantiles
from anaphora.replay.optimum import optimum
from anaphora.replay.simulator import PoolReplay
from anaphora.replay.spool import Prompt, Spool
from anaphora.replay.tiered import TieredReplay, TierSizes

OPTIMUM = "optimum"
"""Name of the job that is no policy: Belady's."""
NOTHING = "none"
"""... and of the cache that keeps nothing."""
_ALONE = 400_000
"""Blocks in all jobs together that are not worth starting processes for."""


@dataclass(frozen=True, slots=True)
class Job:
    """A cache to be tried. `policy`: of blocks.eviction.POLICIES, OPTIMUM or NOTHING."""

    policy: str
    num_blocks: int
    tiers: TierSizes | None = None


@dataclass(slots=True)
class Measured:
    """What it did."""

    job: Job
    hit_blocks: dict[str, int] = field(default_factory=dict)
    """By source: pool, ram, disk, remote."""
    hit_tokens: dict[str, int] = field(default_factory=dict)
    evictions: int = 0
    computing: float = 0.0
    """Seconds of prefill that were left to do; 0 where the speed is not known."""
    loading: float = 0.0
    """Seconds of loading."""
    ttft: Quantiles = field(default_factory=Quantiles)

    @property
    def blocks(self) -> int:
        return sum(self.hit_blocks.values())

    @property
    def tokens(self) -> int:
        return sum(self.hit_tokens.values())

    @property
    def seconds(self) -> float:
        """Of computing and loading."""
        return self.computing + self.loading


def run(spool: Spool, job: Job, costs: Costs) -> Measured:
    """Replay the trace through one cache."""
    result = Measured(job)
    if job.policy == OPTIMUM:
        result.hit_blocks["pool"] = optimum([prompt.blocks for prompt in spool], job.num_blocks)
        return result
    if job.policy == NOTHING:
        for prompt in spool:
            _account(result, prompt, {}, spool.block_size, costs)
        return result
    if job.tiers is not None:
        tiered = TieredReplay(job.num_blocks, job.policy, job.tiers, spool.block_size, costs)
        for prompt in spool:
            _account(result, prompt, tiered.request(prompt.blocks, prompt.arrival), spool.block_size, costs)
        result.evictions = tiered.evictions
        return result
    cache = PoolReplay(job.num_blocks, make_policy(job.policy))
    for prompt in spool:
        found, _ = cache.request(prompt.blocks, prompt.arrival)
        _account(result, prompt, {"pool": found}, spool.block_size, costs)
    result.evictions = cache.pool.evictions
    return result


def _account(result: Measured, prompt: Prompt, hits: dict[str, int], block_size: int, costs: Costs) -> None:
    """Add one request. Its blocks lie in the order of the sources: pool first."""
    reached = 0
    for source, blocks in hits.items():
        before, reached = reached, min(prompt.tokens, reached + blocks * block_size)
        result.hit_blocks[source] = result.hit_blocks.get(source, 0) + blocks
        result.hit_tokens[source] = result.hit_tokens.get(source, 0) + reached - before
    if costs.prefill is None:
        return
    loading = 0.0
    if costs.bytes_per_token is not None:
        nbytes = block_size * costs.bytes_per_token
        loading = max(
            (costs.speeds[tier].seconds(hits[tier] * nbytes) for tier in TIERS if hits.get(tier)), default=0.0
        )
    computing = costs.prefill.seconds(reached, prompt.tokens)
    result.computing += computing
    result.loading += loading
    result.ttft.add(computing + loading)


def run_all(
    spool: Spool, jobs: Iterable[Job], costs: Costs, processes: int, progress: Callable[[int, int], None]
) -> dict[Job, Measured]:
    """Every job's result; `progress` is called with (jobs done, jobs in all).

    Raises InputError when a process was killed.
    """
    todo = list(dict.fromkeys(jobs))
    results: dict[Job, Measured] = {}
    progress(0, len(todo))
    if processes < 2 or len(todo) < 2 or spool.blocks * len(todo) < _ALONE:
        for job in todo:
            results[job] = run(spool, job, costs)
            progress(len(results), len(todo))
        return results
    workers = min(processes, len(todo))
    with ProcessPoolExecutor(workers, get_context("spawn"), signal, (SIGINT, SIG_IGN)) as executor:
        started = {executor.submit(run, spool, job, costs): job for job in todo}
        try:
            for future in as_completed(started):
                results[started[future]] = future.result()
                progress(len(results), len(todo))
        except BrokenProcessPool:
            raise InputError(
                "a process of the replay was killed, most likely for want of memory; give --jobs 1, or --bounded"
            ) from None
        finally:
            executor.shutdown(cancel_futures=True)
    return results
