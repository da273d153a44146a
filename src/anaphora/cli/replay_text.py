"""What `anaphora replay` says to people: sentences and tables, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from anaphora.geometry.units import human_bytes

if TYPE_CHECKING:
    from anaphora.replay.readers.base import ReadReport
    from anaphora.replay.runs import Measured
    from anaphora.replay.study import Study

_SHOWN = 5
"""Bad lines that are shown; --json has a hundred."""


class Grid(NamedTuple):
    """A table and the line below it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str


def headline(study: Study) -> str:
    spool = study.spool
    text = (
        f"{spool.requests:,} requests in {_time(spool.seconds)}, {spool.tokens:,} prompt tokens "
        f"(longest {spool.longest:,})"
    )
    if not spool.blocks:
        return f"{text}. The trace does not say which prompts begin alike: no hit can be told."
    text += f" in {spool.blocks:,} blocks of {spool.block_size}"
    if study.profile is None:
        return f"{text}."
    blocks, tokens = study.curve.ceiling
    return (
        f"{text}, {study.profile.unique_blocks:,} of them different. A cache without end hits "
        f"{_share(blocks, spool.blocks)} of the blocks, {_share(tokens, spool.tokens)} of the tokens."
    )


def warnings(reports: Sequence[tuple[Path, ReadReport]]) -> list[str]:
    """What was wrong with the files."""
    found = []
    for path, report in reports:
        if report.remark:
            found.append(f"{path.name}: {report.remark}")
        if report.num_malformed:
            lines = "; ".join(f"line {line}: {why}" for line, why in report.malformed[:_SHOWN])
            more = f"; and {report.num_malformed - _SHOWN:,} more" if report.num_malformed > _SHOWN else ""
            found.append(f"{path.name}: {report.num_malformed:,} of {report.lines:,} lines left out. {lines}{more}")
        if report.out_of_order:
            found.append(f"{path.name}: {report.out_of_order:,} requests out of order of time; they were sorted.")
    return found


def facts(study: Study) -> list[str]:
    """One sentence each."""
    from anaphora.replay.report import working_sets

    spool, costs = study.spool, study.plan.costs
    found = []
    if study.profile is not None and spool.blocks:
        sets = [
            f"{_time(window)} {round(blocks):,}{_gib(study, round(blocks))}" for window, blocks in working_sets(study)
        ]
        sets.append(f"all of it {study.profile.unique_blocks:,}{_gib(study, study.profile.unique_blocks)}")
        found.append(f"Working set in blocks, on average: {', '.join(sets)}.")
    if costs.bytes_per_token is not None:
        found.append(
            f"A token takes {costs.bytes_per_token:,} bytes"
            + (f", a block {human_bytes(costs.bytes_per_token * spool.block_size)}." if spool.blocks else ".")
        )
    if study.nothing is not None:
        found += _seconds(study)
        found += _tiers(study)
    if study.plan.worth is not None:
        found.append(_worth(study))
    return found


def _seconds(study: Study) -> list[str]:
    costs, nothing = study.plan.costs, study.nothing
    assert nothing is not None
    assert costs.prefill is not None
    speed = study.spool.tokens / nothing.computing if nothing.computing else 0.0
    share = nothing.computing / study.spool.seconds if study.spool.seconds else 0.0
    found = [
        f"Without a cache {_many(costs.devices, costs.device)} at {speed:,.0f} tokens/s would compute "
        f"{_time(nothing.computing)} of prompts"
        + (f", {share:.0%} of the trace's time" if share else "")
        + f"; TTFT without queue {_ttft(nothing)}."
    ]
    endless = study.endless
    if endless is not None and study.spool.blocks:
        saved = nothing.computing - endless.seconds
        found.append(f"Without end a cache saves {_saved(study, saved)}; TTFT {_ttft(endless)}.")
    return found


def _tiers(study: Study) -> list[str]:
    from anaphora.replay.runs import Job

    tiered = study.tiered
    if tiered is None:
        return []
    alone = study.results[Job(tiered.job.policy, tiered.job.num_blocks)]
    return [
        f"The pool alone saves {_saved(study, study.saved(alone) or 0.0)}; TTFT {_ttft(alone)}.",
        f"With its tiers {_saved(study, study.saved(tiered) or 0.0)}, {_time(tiered.loading)} of loading subtracted; "
        f"TTFT {_ttft(tiered)}.",
    ]


def _worth(study: Study) -> str:
    worth, enough = study.plan.worth, study.enough()
    if enough is None:
        return f"No size saves {worth:g} s an hour for each of its GiB."
    return (
        f"Up to {enough.gib:,.1f} GiB a GiB saves {worth:g} s an hour or more under {study.main_policy}; beyond, less."
    )


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
            first = _share(blocks, study.spool.blocks)
            row.append(first if tokens is None else f"{first} {_share(tokens, study.spool.tokens)}")
        measured = study.results.get(Job(study.main_policy, size))
        if timed and measured is not None:
            row += [_time(study.saved(measured) or 0.0), *(_time(measured.ttft.at(q)) for q in (0.5, 0.9, 0.99))]
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
            shares = (_share(hit, spool.blocks), _share(tokens, spool.tokens))
            rows.append((source, f"{blocks:,}", f"{study.gib(blocks) or 0:,.1f}", *shares))
    total = (_share(measured.blocks, spool.blocks), _share(measured.tokens, spool.tokens))
    rows.append(("all", "", "", *total))
    return Grid(
        ("hits from", ">blocks", ">GiB", ">% of blocks", ">% of tokens"),
        rows,
        f"{study.main_policy}, {sizes.write_policy.value}.",
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
        (_time(stop), _share(count, uses), _share(sum(b[2] for b in times[: i + 1]), uses))
        for i, (_, stop, count) in enumerate(times)
    ]
    found.append(Grid((">back within", ">blocks", ">all until then"), rows, "Time since a block's last use."))
    rows = [
        (_tokens(stop), _share(count, near), _share(sum(b[2] for b in distances[: i + 1]), near))
        for i, (_, stop, count) in enumerate(distances)
    ]
    found.append(
        Grid((">within a cache of", ">blocks", ">all until then"), rows, "Reuse distance: the tokens LRU must hold.")
    )
    rows = [
        (f"{_tokens(start)} to {_tokens(stop)}", _share(used, spool.blocks), _share(seen, used))
        for start, stop, used, seen in depths(study)
    ]
    found.append(Grid((">token", ">of all blocks", ">seen before"), rows, "Depth in the prompt."))
    rows = [
        (f"{prefix.uses:,}", f"{prefix.blocks * spool.block_size:,}", f"{(prefix.uses - 1) * prefix.blocks:,}")
        for prefix in profile.top_prefixes(10)
    ]
    found.append(Grid((">prompts", ">tokens shared", ">blocks saved"), rows, "The prefixes that save most."))
    return found


def print_study(study: Study, reports: Sequence[tuple[Path, ReadReport]]) -> None:
    from rich.console import Console

    from anaphora.cli.tables import print_table

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(" · ".join(f"{path.name} ({report.format})" for path, report in reports), style="dim")
    console.print(f"\n{headline(study)}\n", style="bold")
    for text in warnings(reports):
        console.print(f"! {text}", style="yellow")
    for text in facts(study):
        console.print(f"- {text}")
    if not study.spool.blocks:
        return
    console.print()
    print_table(*sizes_table(study))
    if (tiers := tiers_table(study)) is not None:
        print_table(*tiers)
    if study.profile is not None:
        for grid in reuse_tables(study):
            print_table(*grid)


def _saved(study: Study, seconds: float) -> str:
    costs = study.plan.costs
    hours = seconds / 3600 * costs.devices
    per_hour = f" ({seconds / study.hours:,.0f} s an hour)" if study.hours else ""
    return f"{hours:,.2f} {costs.device}-hours{per_hour}"


def _ttft(measured: Measured) -> str:
    return ", ".join(f"p{round(q * 100)} {_time(measured.ttft.at(q))}" for q in (0.5, 0.9, 0.99))


def _many(count: int, device: str) -> str:
    return f"{count} x {device}" if count > 1 else f"the {device}" if device == "device" else device


def _gib(study: Study, blocks: int) -> str:
    gib = study.gib(blocks)
    return "" if gib is None else f" ({gib:,.1f} GiB)"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def _tokens(count: float) -> str:
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if count >= size:
            return f"{count / size:,.0f}{unit}"
    return f"{count:,.0f}"


def _time(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}".replace(".0 ", " ")
    return f"{seconds:.1f} s".replace(".0 ", " ")
