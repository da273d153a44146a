"""The page of `anaphora replay --html`: the same words and tables as in the terminal, and curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anaphora.cli.replay_tables import Grid, reuse_tables, sizes_table, tiers_table
from anaphora.cli.replay_text import facts, headline, warnings
from anaphora.probes.html import Html, Section, bullets, page, paragraph, table
from anaphora.probes.plots import Mark, Series, plot

if TYPE_CHECKING:
    from anaphora.replay.readers.base import ReadReport
    from anaphora.replay.study import Study

_POINTS = 48
"""Of LRU's curve, which is known at every size."""


def html_page(study: Study, reports: Sequence[tuple[Path, ReadReport]]) -> str:
    title = "Replay of " + ", ".join(path.name for path, _ in reports)
    formats = ", ".join(dict.fromkeys(report.format for _, report in reports))
    sections = [Section("What was found", [bullets([*warnings(reports), *facts(study)])])]
    if study.spool.blocks:
        sections.append(Section("Hits by size of the cache", [_hit_curves(study), *_grid(sizes_table(study))]))
        if study.offers():
            sections.append(Section("What a size saves", [_savings(study)]))
        sections.append(Section("Tiers", _grid(tiers_table(study))))
        if study.profile is not None:
            names = ("When blocks come back", "How large a cache they need", "Where in the prompt", "Shared prefixes")
            plots = (_reuse_times(study), _reuse_distances(study), _depths(study), None)
            sections += [
                Section(name, [*([drawn] if drawn else []), *_grid(grid)])
                for name, drawn, grid in zip(names, plots, reuse_tables(study), strict=True)
            ]
    return page(title, formats, headline(study), "good" if study.spool.blocks else "unsure", sections)


def _grid(grid: Grid | None) -> list[Html]:
    return [] if grid is None else [table(grid.columns, grid.rows), paragraph(grid.caption)]


def _hit_curves(study: Study) -> Html:
    from anaphora.replay.report import policies
    from anaphora.replay.runs import OPTIMUM

    shown = policies(study)
    if len(shown) > 5:  # colours; the table has all
        shown = ["lru", study.main_policy, OPTIMUM] if study.profile is not None else shown[:5]
    series = []
    for name in shown:
        sizes = _dense(study) if name == "lru" else study.sizes
        rates = [100 * _blocks(study, name, size) / study.spool.blocks for size in sizes]
        series.append(Series(name, [_x(study, size) for size in sizes], rates))
    pool = study.plan.pool
    marks = [Mark(_x(study, pool), "pool")] if pool is not None and study.tiered is not None else []
    return plot("Hits, percent of blocks", _unit(study), "%", series, marks=marks, log_x=True)


def _blocks(study: Study, policy: str, size: int) -> int:
    return study.curve.hits(size)[0] if policy == "lru" else study.hits(policy, size)[0]


def _dense(study: Study) -> list[int]:
    low, high = max(1, study.sizes[0]), study.sizes[-1]
    return sorted({round(low * (high / low) ** (step / _POINTS)) for step in range(_POINTS + 1)})


def _savings(study: Study) -> Html:
    offers = study.offers()
    hours = study.hours or 1.0
    enough = study.enough()
    marks = [Mark(enough.gib, "enough")] if enough is not None else []
    xs, ys = [offer.gib for offer in offers], [offer.saved_seconds / hours for offer in offers]
    unit = "seconds an hour" if study.hours else "seconds"
    return plot(f"Prefill saved, {study.main_policy}", "GiB", unit, [Series("saved", xs, ys)], marks=marks, log_x=True)


def _reuse_times(study: Study) -> Html | None:
    from anaphora.replay.report import reuse_times

    return _cumulated([(stop, count) for _, stop, count in reuse_times(study)], "Blocks back within", "seconds")


def _reuse_distances(study: Study) -> Html | None:
    from anaphora.replay.report import reuse_distances

    bins = [(stop, count) for _, stop, count in reuse_distances(study)]
    return _cumulated(bins, "Reuses that fit into an LRU cache of", "tokens")


def _cumulated(bins: list[tuple[float, int]], title: str, unit: str) -> Html | None:
    total = sum(count for _, count in bins)
    if not total:
        return None
    done, ys = 0, []
    for _, count in bins:
        done += count
        ys.append(100 * done / total)
    return plot(title, unit, "% of reuses", [Series(title, [stop for stop, _ in bins], ys)], log_x=True)


def _depths(study: Study) -> Html:
    from anaphora.replay.report import depths

    found = depths(study)
    xs = [stop for _, stop, _, _ in found]
    share = [100 * used / study.spool.blocks for _, _, used, _ in found]
    again = [100 * seen / max(1, used) for _, _, used, seen in found]
    series = [Series("share of all blocks", xs, share), Series("seen before", xs, again)]
    return plot("Blocks by depth in the prompt", "tokens, up to", "%", series, log_x=True)


def _x(study: Study, blocks: int) -> float:
    gib = study.gib(blocks)
    return blocks if gib is None else gib


def _unit(study: Study) -> str:
    return "blocks" if study.plan.costs.bytes_per_token is None else "GiB"
