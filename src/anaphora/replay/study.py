"""Everything `anaphora replay` says about a trace, gathered: passes over the spool, then caches tried side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from anaphora.errors import InputError
from anaphora.replay.costs import Costs, Offer, worthwhile
from anaphora.replay.lru_curve import LRUCurve
from anaphora.replay.profile import TraceProfile
from anaphora.replay.readers.base import ReadReport, TraceRequest
from anaphora.replay.readers.chats import Tokenize
from anaphora.replay.readers.registry import FORMATS
from anaphora.replay.readers.source import read_trace
from anaphora.replay.runs import NOTHING, OPTIMUM, Job, Measured, run_all
from anaphora.replay.spool import Spool
from anaphora.replay.tiered import TierSizes

Progress = Callable[[str, int, int | None], None]
"""Called with (stage, steps done, steps in all or None where nobody knows)."""

GIB = 1 << 30
_MOST_SIZES = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be tried."""

    policies: Sequence[str]
    sizes: Sequence[int] = ()
    """Blocks; empty: chosen by the trace."""
    pool: int | None = None
    """Blocks of the pool in front of the tiers."""
    tiers: TierSizes | None = None
    costs: Costs = field(default_factory=Costs)
    worth: float | None = None
    """Seconds of prefill, per hour of traffic, that one more GiB must save."""
    bounded: bool = False
    """Leave out what needs memory for every block of the trace."""
    processes: int = 1


@dataclass(slots=True)
class Study:
    """What was found."""

    spool: Spool
    plan: Plan
    sizes: list[int]
    """Blocks, ascending."""
    results: dict[Job, Measured]
    curve: LRUCurve
    profile: TraceProfile | None

    @property
    def main_policy(self) -> str:
        """The policy whose figures stand for what a server does."""
        return self.plan.policies[-1]

    @property
    def hours(self) -> float:
        return self.spool.seconds / 3600

    def gib(self, blocks: int) -> float | None:
        weight = self.plan.costs.bytes_per_token
        return None if weight is None else blocks * self.spool.block_size * weight / GIB

    def hits(self, policy: str, blocks: int) -> tuple[int, int | None]:
        """(blocks, tokens) that hit; tokens are not known of the optimum."""
        measured = self.results.get(Job(policy, blocks))
        if measured is None:  # LRU, which needs no run of its own
            return self.curve.hits(blocks)
        return measured.blocks, None if policy == OPTIMUM else measured.tokens

    @property
    def nothing(self) -> Measured | None:
        """Without any cache; None where no speed is known."""
        return self.results.get(Job(NOTHING, 1))

    @property
    def endless(self) -> Measured | None:
        """With all blocks kept."""
        return self.results.get(Job("lru", self.profile.unique_blocks)) if self.profile is not None else None

    @property
    def tiered(self) -> Measured | None:
        if self.plan.tiers is None or self.plan.pool is None:
            return None
        return self.results.get(Job(self.main_policy, self.plan.pool, self.plan.tiers))

    def saved(self, measured: Measured) -> float | None:
        """Seconds against computing everything."""
        return None if self.nothing is None else self.nothing.computing - measured.seconds

    def offers(self) -> list[Offer]:
        """By size, under the main policy; empty where bytes or speed are not known."""
        found = []
        for size in self.sizes:
            gib, measured = self.gib(size), self.results.get(Job(self.main_policy, size))
            if gib is not None and measured is not None and (saved := self.saved(measured)) is not None:
                found.append(Offer(gib, saved))
        return found

    def enough(self) -> Offer | None:
        """The largest size that is worth it; None: none is, or nobody asked."""
        if self.plan.worth is None or not self.hours:
            return None
        return worthwhile(self.offers(), self.plan.worth, self.hours)


def read_all(
    paths: Sequence[Path],
    reports: list[tuple[Path, ReadReport]],
    progress: Progress,
    *,
    form: str | None = None,
    strict: bool = False,
    tokenize: Tokenize | None = None,
) -> Iterator[TraceRequest]:
    """The requests of all files, one file after the other; what was wrong with each goes into `reports`.

    Raises InputError when not one line of them can be used, and as `read_trace` does.
    """
    done = 0
    for path in paths:
        report = ReadReport()
        reports.append((path, report))
        progress(f"Reading {path.name or path}", done, None)
        for request in read_trace(path, report, form=form, strict=strict, tokenize=tokenize):
            yield request
            done += 1
            if done % 1024 == 0:
                progress(f"Reading {path.name or path}", done, None)
    bad = [(path, report) for path, report in reports if report.malformed]
    if not done and bad:
        path, report = bad[0]
        line, why = report.malformed[0]
        raise InputError(
            f"the trace holds no usable request. {path} was read as {report.format}, and line {line} is no such line: "
            f"{why}. Correct the trace, or say what it is with --format {'|'.join(FORMATS)}"
        )


def examine(spool: Spool, plan: Plan, progress: Progress) -> Study:
    """All that `plan` asks of a trace that has blocks (or of its lengths alone, where it has none)."""
    profile = None if plan.bounded else TraceProfile()
    curve = LRUCurve(max(plan.sizes, default=1) if plan.bounded else None)
    for number, prompt in enumerate(spool, 1):
        curve.request(prompt.blocks, spool.block_size, min(prompt.tokens, len(prompt.blocks) * spool.block_size))
        if profile is not None:
            profile.request(prompt.blocks, prompt.arrival)
        if number % 256 == 0:
            progress("Measuring reuse", number, spool.requests)
    sizes = sorted(set(plan.sizes)) or chosen_sizes(curve)
    jobs = list(_jobs(plan, spool, sizes, profile))
    results = run_all(
        spool, jobs, plan.costs, plan.processes, lambda done, total: progress("Trying caches", done, total)
    )
    return Study(spool, plan, sizes, results, curve, profile)


def _jobs(plan: Plan, spool: Spool, sizes: Sequence[int], profile: TraceProfile | None) -> Iterable[Job]:
    timed = plan.costs.prefill is not None
    if timed:
        yield Job(NOTHING, 1)
    if not spool.blocks:
        return
    if plan.pool is not None and plan.tiers is not None:
        yield Job(plan.policies[-1], plan.pool, plan.tiers)
        yield Job(plan.policies[-1], plan.pool)
    if profile is not None:
        if timed:
            yield Job("lru", profile.unique_blocks)
        yield from (Job(OPTIMUM, size) for size in sizes)
    for policy in plan.policies:
        if policy != "lru" or timed:  # LRU's hits are in the curve, its seconds are not
            yield from (Job(policy, size) for size in sizes)


def chosen_sizes(curve: LRUCurve) -> list[int]:
    """1, 2, 5, 10 ... blocks, the largest that is of use to LRU last, and not more than a few."""
    distances = curve.distances()
    most = distances[-1][1] if distances else 1
    steps = [factor * 10**power for power in range(13) for factor in (1, 2, 5)]
    last = next(index for index, step in enumerate(steps) if step >= most)
    return steps[max(0, last + 1 - _MOST_SIZES) : last + 1]
