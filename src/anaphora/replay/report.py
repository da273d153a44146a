"""A study as JSON, and the figures that its texts and pages share. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anaphora.replay.readers.base import ReadReport
from anaphora.replay.runs import OPTIMUM, Job, Measured
from anaphora.replay.study import Study

SCHEMA_VERSION = 1
SHARES = (0.5, 0.9, 0.99)
WINDOWS = (60, 600, 3600, 86400)
"""Seconds, of working sets."""
_TOP = 10

Bin = tuple[float, float, int]
"""(from, to, count)."""


def _doubling(values: Iterable[tuple[float, int]], unit: float) -> list[Bin]:
    """(value, count) in bins [0, unit), [unit, 2 unit), [2 unit, 4 unit) ..."""
    found: dict[int, int] = {}
    for value, count in values:
        place = 0 if value < unit else 1 + int(math.log2(value / unit) + 1e-12)
        found[place] = found.get(place, 0) + count
    last = max(found, default=-1)
    return [(unit * 2 ** (p - 1) if p else 0, unit * 2**p, found.get(p, 0)) for p in range(last + 1)]


def reuse_distances(study: Study) -> list[Bin]:
    """Blocks that were used since, in tokens' worth of cache: how large a cache LRU would have needed."""
    size = study.spool.block_size
    values = (
        (distance * size, count) for start, stop, count in study.curve.distances() for distance in range(start, stop)
    )
    return _doubling(values, 16384.0)


def reuse_times(study: Study) -> list[Bin]:
    """Seconds since a block's last use."""
    assert study.profile is not None
    return _doubling(study.profile.reuse_seconds.items(), 1.0)


def depths(study: Study) -> list[tuple[float, float, int, int]]:
    """(from token, to token, block uses there, of those not the first)."""
    assert study.profile is not None
    size = study.spool.block_size
    uses = _doubling(((depth * size, used) for depth, (used, _) in study.profile.by_depth.items()), 1024.0)
    again = _doubling(((depth * size, seen) for depth, (_, seen) in study.profile.by_depth.items()), 1024.0)
    return [(start, stop, used, seen) for (start, stop, used), (_, _, seen) in zip(uses, again, strict=True)]


def working_sets(study: Study) -> list[tuple[int, float]]:
    """(seconds, blocks used in such a window on average), as far as the trace is longer."""
    assert study.profile is not None
    return [(window, study.profile.working_set(window)) for window in WINDOWS if window < study.spool.seconds]


def ttft(measured: Measured) -> dict[str, float] | None:
    if not measured.ttft.count:
        return None
    return {f"p{share * 100:g}": measured.ttft.at(share) for share in SHARES}


def as_dict(study: Study, reports: Sequence[tuple[Path, ReadReport]]) -> dict[str, Any]:
    """The JSON report; floats are finite."""
    spool, plan = study.spool, study.plan
    costs = plan.costs
    prefill = None if costs.prefill is None else asdict(costs.prefill)
    enough = study.enough()
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "replay",
        "files": [_file(path, report) for path, report in reports],
        "trace": {
            "requests": spool.requests,
            "seconds": spool.seconds,
            "input_tokens": spool.tokens,
            "output_tokens": spool.output_tokens,
            "longest_input": spool.longest,
            "block_size": spool.block_size or None,
            "blocks": spool.blocks,
            "unique_blocks": study.profile.unique_blocks if study.profile is not None else None,
            "holds_prefixes": bool(spool.blocks),
        },
        "costs": {
            "bytes_per_token": costs.bytes_per_token,
            "prefill_seconds": prefill,
            "devices": costs.devices,
            "device": costs.device,
        },
        "without_cache": _seconds(study, study.nothing),
        "endless_cache": _endless(study),
        "sizes": [_size(study, size) for size in study.sizes] if spool.blocks else [],
        "tiers": _tiers(study),
        "worth": None
        if plan.worth is None
        else {"seconds_per_hour_per_gib": plan.worth, "gib": None if enough is None else enough.gib},
        **(_profile(study) if study.profile is not None and spool.blocks else {}),
    }


def _file(path: Path, report: ReadReport) -> dict[str, Any]:
    return {
        "path": str(path),
        "format": report.format,
        "lines": report.lines,
        "requests": report.requests,
        "malformed": report.num_malformed,
        "first_malformed": [{"line": line, "why": why} for line, why in report.malformed],
        "out_of_order": report.out_of_order,
        "remark": report.remark or None,
    }


def _seconds(study: Study, measured: Measured | None) -> dict[str, Any] | None:
    if measured is None or study.nothing is None:
        return None
    saved = study.saved(measured)
    assert saved is not None
    return {
        "prefill_seconds": measured.computing,
        "load_seconds": measured.loading,
        "saved_seconds": saved,
        "saved_device_hours": saved / 3600 * study.plan.costs.devices,
        "ttft_seconds": ttft(measured),
    }


def _endless(study: Study) -> dict[str, Any] | None:
    if study.profile is None or not study.spool.blocks:
        return None
    blocks, tokens = study.curve.ceiling
    return {**_rates(study, blocks, tokens), "seconds": _seconds(study, study.endless)}


def _rates(study: Study, blocks: int, tokens: int | None) -> dict[str, Any]:
    return {
        "hit_blocks": blocks,
        "block_hit_rate": blocks / max(1, study.spool.blocks),
        "hit_tokens": tokens,
        "token_hit_rate": None if tokens is None else tokens / max(1, study.spool.tokens),
    }


def policies(study: Study) -> list[str]:
    """Of the table, the optimum last."""
    return [*study.plan.policies, *([OPTIMUM] if study.profile is not None else [])]


def _size(study: Study, size: int) -> dict[str, Any]:
    row: dict[str, Any] = {"blocks": size, "gib": study.gib(size), "policies": {}}
    for policy in policies(study):
        blocks, tokens = study.hits(policy, size)
        measured = study.results.get(Job(policy, size)) if policy != OPTIMUM else None
        row["policies"][policy] = {**_rates(study, blocks, tokens), "seconds": _seconds(study, measured)}
    return row


def _tiers(study: Study) -> dict[str, Any] | None:
    measured, sizes = study.tiered, study.plan.tiers
    if measured is None or sizes is None:
        return None
    return {
        "policy": measured.job.policy,
        "ram_policy": sizes.ram_policy or measured.job.policy,
        "disk_policy": sizes.disk_policy or measured.job.policy,
        "pool_blocks": measured.job.num_blocks,
        "ram_blocks": sizes.ram,
        "disk_blocks": sizes.disk,
        "remote_blocks": sizes.remote,
        "write_policy": sizes.write_policy.value,
        "sources": {
            source: _rates(study, blocks, measured.hit_tokens[source]) for source, blocks in measured.hit_blocks.items()
        },
        "seconds": _seconds(study, measured),
    }


def _profile(study: Study) -> dict[str, Any]:
    profile = study.profile
    assert profile is not None
    size = study.spool.block_size
    return {
        "working_set": [{"seconds": window, "blocks": blocks} for window, blocks in working_sets(study)],
        "reuse_distance_tokens": [_bin(*each) for each in reuse_distances(study)],
        "reuse_seconds": [_bin(*each) for each in reuse_times(study)],
        "depth_tokens": [
            {"from": start, "to": stop, "blocks": used, "seen_before": seen}
            for start, stop, used, seen in depths(study)
        ],
        "top_prefixes": [
            {"uses": prefix.uses, "blocks": prefix.blocks, "tokens": prefix.blocks * size}
            for prefix in profile.top_prefixes(_TOP)
        ],
    }


def _bin(start: float, stop: float, count: int) -> dict[str, Any]:
    return {"from": start, "to": stop, "blocks": count}
