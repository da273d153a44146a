"""The tables of `anaphora replay`, for the terminal and for the page, and how their figures are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from anaphora.replay.study import Study


class Grid(NamedTuple):
    """A table and the line below it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str


def sizes_table(study: Study) -> Grid:
    """Hit rates by size and policy; what the main policy saves."""
    from anaphora.replay.report import policies
    from anaphora.replay.runs import OPTIMUM, Job

    weighed, timed = study.plan.costs.bytes_per_token is not None, study.nothing is not None
    names = policies(study)
    columns = [">blocks", *([">GiB"] if weighed else []), *(f">{name}" for name in names)]
    if timed:
        columns += [">saved", ">TTFT p50", ">p90", ">p99"]
    rows = []
    for size in study.sizes:
        row = [f"{size:,}"]
        if weighed:
            row.append(f"{study.gib(size):,.1f}")
        for name in names:
            blocks, tokens = study.hits(name, size)
            first = share(blocks, study.spool.blocks)
            row.append(first if tokens is None else f"{first} {share(tokens, study.spool.tokens)}")
        measured = study.results.get(Job(study.main_policy, size))
        if timed and measured is not None:
            row += [duration(study.saved(measured) or 0.0), *(duration(measured.ttft.at(q)) for q in (0.5, 0.9, 0.99))]
        rows.append(row)
    note = f"; saved over the trace and TTFT without queue: {study.main_policy}" if timed else ""
    best = "; optimum: with the future known, blocks" if OPTIMUM in names else ""
    return Grid(columns, rows, f"Hits in percent of blocks, of tokens{best}{note}.")


def tiers_table(study: Study) -> Grid | None:
    """Where hits came from; None without tiers."""
    measured, sizes = study.tiered, study.plan.tiers
    if measured is None or sizes is None:
        return None
    spool = study.spool
    held = {"pool": measured.job.num_blocks, "ram": sizes.ram, "disk": sizes.disk, "remote": sizes.remote}
    rows = []
    for source, blocks in held.items():
        if blocks:
            hit, tokens = measured.hit_blocks.get(source, 0), measured.hit_tokens.get(source, 0)
            shares = (share(hit, spool.blocks), share(tokens, spool.tokens))
            rows.append((source, f"{blocks:,}", f"{study.gib(blocks) or 0:,.1f}", *shares))
    total = (share(measured.blocks, spool.blocks), share(measured.tokens, spool.tokens))
    rows.append(("all", "", "", *total))
    others = "".join(
        f", {tier} {name}" for tier, name in (("RAM", sizes.ram_policy), ("disk", sizes.disk_policy)) if name
    )
    return Grid(
        ("hits from", ">blocks", ">GiB", ">% of blocks", ">% of tokens"),
        rows,
        f"{study.main_policy}{others}, {sizes.write_policy.value}.",
    )


def reuse_tables(study: Study) -> list[Grid]:
    """When and how far away blocks come back, how deep, and the prefixes shared most."""
    from anaphora.replay.report import depths, reuse_distances, reuse_times

    profile, spool = study.profile, study.spool
    assert profile is not None
    found = []
    times, distances = reuse_times(study), reuse_distances(study)
    uses, near = sum(bin_[2] for bin_ in times), sum(bin_[2] for bin_ in distances)
    rows = [
        (duration(stop), share(count, uses), share(sum(b[2] for b in times[: i + 1]), uses))
        for i, (_, stop, count) in enumerate(times)
    ]
    found.append(Grid((">back within", ">blocks", ">all until then"), rows, "Time since a block's last use."))
    rows = [
        (token_count(stop), share(count, near), share(sum(b[2] for b in distances[: i + 1]), near))
        for i, (_, stop, count) in enumerate(distances)
    ]
    found.append(
        Grid((">within a cache of", ">blocks", ">all until then"), rows, "Reuse distance: the tokens LRU must hold.")
    )
    rows = [
        (f"{token_count(start)} to {token_count(stop)}", share(used, spool.blocks), share(seen, used))
        for start, stop, used, seen in depths(study)
    ]
    found.append(Grid((">token", ">of all blocks", ">seen before"), rows, "Depth in the prompt."))
    rows = [
        (f"{prefix.uses:,}", f"{prefix.blocks * spool.block_size:,}", f"{(prefix.uses - 1) * prefix.blocks:,}")
        for prefix in profile.top_prefixes(10)
    ]
    found.append(Grid((">prompts", ">tokens shared", ">blocks saved"), rows, "The prefixes that save most."))
    return found


def share(part: float, whole: float) -> str:
    """In percent."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def token_count(count: float) -> str:
    """In powers of two: 512, 16k, 2M."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if count >= size:
            return f"{count / size:,.0f}{unit}"
    return f"{count:,.0f}"


def duration(seconds: float) -> str:
    """Rounded: 120 ms, 3.5 s, 26 min, 2.2 h."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}".replace(".0 ", " ")
    return f"{seconds:.1f} s".replace(".0 ", " ")
