"""The report: JSON with a stable schema, and the same as a Markdown table."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.limits import Geometry, Limits
from benchmarks.peers.registry import OURS
from benchmarks.peers.runs import Cell
from benchmarks.peers.workload import Workload


def row(workload: Workload, cells: dict[str, Cell], limit: float | None) -> dict[str, Any]:
    """One workload: every engine's figures, the best peer, and ours against it and against the limit.

    Ratios are above 1 when ours is the better one, whether more or less is better; the share of the limit is at most
    1 (apart from noise).
    """
    peers = {name: cell.median for name, cell in cells.items() if name != OURS and cell.median is not None}
    pick = max if workload.more_is_better else min
    best = pick(peers, key=lambda name: peers[name] or 0) if peers else None
    ours = cells[OURS].median if OURS in cells else None

    def ahead(value: float, other: float) -> float:
        return value / other if workload.more_is_better else other / value

    best_value = peers[best] if best else None
    return {
        "name": workload.name,
        "title": workload.title,
        "unit": workload.unit,
        "more_is_better": workload.more_is_better,
        "goal": workload.goal,
        "limit": limit,
        "engines": {name: cell.to_json() for name, cell in cells.items()},
        "best_peer": best,
        "ours_over_best_peer": ahead(ours, best_value) if ours and best_value else None,
        "ours_over_peer": {name: ahead(ours, value) for name, value in peers.items() if ours and value},
        "ours_share_of_limit": ahead(ours, limit) if ours and limit else None,
    }


def markdown(report: dict[str, Any]) -> str:
    """The table, the limits, and why a cell is empty."""
    engines = report["engines"]
    machine, limits = report["machine"], report["limits"]
    lines = [
        f"{machine['cpu']}, {report['threads']} threads; {report['model']}; commit {machine['commit'][:10] or '-'}; "
        f"load before {report['load_before'][0]:.1f}, after {report['load_after'][0]:.1f}; "
        f"{report['seconds'] / 60:.1f} minutes.",
        "",
        f"Limits measured in this run: read {limits['bandwidth'] / 1e9:.1f} GB/s ({limits['bandwidth_method']}), "
        + ", ".join(f"{name} product {rate / 1e9:.0f} GFLOP/s" for name, rate in limits["gemm"].items())
        + ".",
        "",
        f"Medians [interquartile range] of up to {report['rounds']} turns, the engines taking turns; n where fewer.",
        "",
        "| workload | " + " | ".join(engines) + " | limit | ours / best peer | ours / limit | goal |",
        "|---" * (len(engines) + 5) + "|",
    ]
    reasons: dict[str, int] = {}
    for entry in report["workloads"]:
        cells = [_cell(entry["engines"].get(name), report["rounds"], reasons) for name in engines]
        last = [
            _number(entry["limit"]),
            _ratio(entry["ours_over_best_peer"]) + (f" ({entry['best_peer']})" if entry["best_peer"] else ""),
            _share(entry["ours_share_of_limit"]),
            entry["goal"],
        ]
        lines.append(f"| {entry['title']} ({entry['unit']}) | " + " | ".join([*cells, *last]) + " |")
    lines += ["", *(f"({number}) {reason.replace('|', '/')}  " for reason, number in reasons.items())]
    for name, memory in report["memory"].items():
        bound = f"; bound {memory['bound_bytes'] / 1e6:,.0f} MB" if "bound_bytes" in memory else ""
        lines.append(f"Peak RSS of the server, {name}: {memory['peak_bytes'] / 1e6:,.0f} MB{bound}.  ")
    return "\n".join(lines) + "\n"


def limits_json(bandwidths: list[float], method: str, gemms: dict[str, list[float]]) -> dict[str, Any]:
    """The best samples: a limit that another process lowered for a moment is none."""
    return {
        "bandwidth": max(bandwidths),
        "bandwidth_samples": bandwidths,
        "bandwidth_method": method,
        "gemm": {name: max(rates) for name, rates in gemms.items()},
        "gemm_samples": gemms,
    }


def limit_of(workload: Workload, limits: dict[str, Any], geometry: Geometry) -> float | None:
    return Limits(limits["bandwidth"], max(limits["gemm"].values())).of(workload, geometry)


def _cell(cell: dict[str, Any] | None, rounds: int, reasons: dict[str, int]) -> str:
    if cell is None:
        return ""
    if "reason" in cell:
        return f"- ({reasons.setdefault(cell['reason'], len(reasons) + 1)})"
    few = f", n={cell['n']}" if cell["n"] < rounds else ""
    note = f" {cell['note']}" if cell["note"] else ""
    return f"{_number(cell['median'])} [{_number(cell['q1'])}..{_number(cell['q3'])}{few}]{note}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"
