"""What `anaphora replay` says to people in sentences, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anaphora.cli.replay_tables import duration, reuse_tables, share, sizes_table, tiers_table
from anaphora.geometry.units import human_bytes

if TYPE_CHECKING:
    from anaphora.replay.readers.base import ReadReport
    from anaphora.replay.runs import Measured
    from anaphora.replay.study import Study

_SHOWN = 5
"""Bad lines that are shown; --json has a hundred."""


def headline(study: Study) -> str:
    spool = study.spool
    text = (
        f"{spool.requests:,} requests in {duration(spool.seconds)}, {spool.tokens:,} prompt tokens "
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
        f"{share(blocks, spool.blocks)} of the blocks, {share(tokens, spool.tokens)} of the tokens."
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
            f"{duration(window)} {round(blocks):,}{_gib(study, round(blocks))}"
            for window, blocks in working_sets(study)
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
    busy = nothing.computing / study.spool.seconds if study.spool.seconds else 0.0
    found = [
        f"Without a cache {_many(costs.devices, costs.device)} at {speed:,.0f} tokens/s would compute "
        f"{duration(nothing.computing)} of prompts"
        + (f", {busy:.0%} of the trace's time" if busy else "")
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
        f"With its tiers {_saved(study, study.saved(tiered) or 0.0)}, "
        f"{duration(tiered.loading)} of loading subtracted; TTFT {_ttft(tiered)}.",
    ]


def _worth(study: Study) -> str:
    worth, enough = study.plan.worth, study.enough()
    if enough is None:
        return f"No size saves {worth:g} s an hour for each of its GiB."
    beyond = "more was not tried" if enough == study.offers()[-1] else "beyond, less"
    return f"Up to {enough.gib:,.1f} GiB a GiB saves {worth:g} s an hour or more under {study.main_policy}; {beyond}."


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
    return ", ".join(f"p{round(q * 100)} {duration(measured.ttft.at(q))}" for q in (0.5, 0.9, 0.99))


def _many(count: int, device: str) -> str:
    return f"{count} x {device}" if count > 1 else f"the {device}" if device == "device" else device


def _gib(study: Study, blocks: int) -> str:
    gib = study.gib(blocks)
    return "" if gib is None else f" ({gib:,.1f} GiB)"
