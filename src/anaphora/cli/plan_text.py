"""A plan for the terminal: the memory bar, the verdict with its numbers, ways out, settings, the heat map."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from anaphora.cli.tables import PIPE_WIDTH
from anaphora.geometry.units import human_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from anaphora.cli.quality_summary import QualityFile
    from anaphora.planning.report import Report

_BAR = 60
_GIB = 2**30


def headline(report: Report) -> str:
    """'Qwen/Qwen2.5-7B-Instruct on 1 x RTX 4090, vllm'."""
    situation = report.question.situation
    named = f"{report.question.model} on {situation.devices} x {situation.device.name}, {report.question.engine.name}"
    return named + _assumed(report)


def _assumed(report: Report) -> str:
    """What follows every figure that rests on --assume-full-attention."""
    return " [assumed]" if report.question.geometry.assumed_full_attention else ""


def verdict(report: Report) -> str:
    """Yes or no, with the numbers."""
    return _verdict(report) + _assumed(report)


def _verdict(report: Report) -> str:
    now, asked = report.answer, report.question.workload
    wanted = f"{asked.concurrency:,} x {asked.context:,} tokens"
    if not now.weights_fit:
        return (
            f"NO: weights and overhead alone are {human_bytes(report.weights_missing)} more than the "
            f"{human_bytes(now.budget.allowed_bytes)} there are; nothing is left for KV{_least(report)}"
        )
    numbers = f"{wanted} take {now.needed_bytes:,} bytes of KV ({human_bytes(now.needed_bytes)}); "
    low, high = now.budget.available.low, now.budget.available.high
    spread = f"{human_bytes(max(0, low))} to {human_bytes(max(0, high))}"
    numbers += f"{human_bytes(now.available_bytes)} are likely left for it ({spread})"
    if now.fits:
        sure = "" if now.surely else ", but only just: at the bad end of the estimates it does not"
        return f"YES{sure}: {numbers}"
    return f"NO: {numbers}; {now.requests:,} of {asked.concurrency:,} fit"


def _least(report: Report) -> str:
    """What the weights take at least."""
    least = report.smallest_weights
    return f". In {least[0]} the weights would take {human_bytes(least[1])}" if least else ""


def print_report(report: Report, with_grid: bool, measured: QualityFile | None = None) -> None:
    """Everything, on stdout. `measured`: what `anaphora quality` found."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, markup=False, soft_wrap=True)
    console.print(headline(report), style="bold")
    _bar(console, report)
    console.print(f"\n{verdict(report)}", style="green" if report.answer.fits else "red")
    _limits(console, report)
    if report.ways_out:
        _ways(console, report)
    _kv_types(console, report, measured)
    _settings(console, report)
    if with_grid:
        _grid(console, report)
    for remark in report.remarks:
        console.print(f"\nNote: {remark}.")


def _bar(console: Console, report: Report) -> None:
    """One device: weights, overhead, the KV that is needed, the rest of the KV memory, free."""
    from rich.text import Text

    now = report.answer
    budget = now.budget
    weights = budget.part("weights").likely
    overhead = sum(part.bytes.likely for part in budget.parts if part.name != "weights")
    used = min(now.needed_bytes, now.available_bytes)
    pieces = (
        ("weights", weights, "█", "blue"),
        ("overhead", overhead, "▓", "yellow"),
        ("KV needed", used, "▒", "green" if now.fits else "red"),
        ("KV spare", now.available_bytes - used, "░", "green"),
        ("free", max(0, now.free_bytes), "·", "dim"),
    )
    total = max(budget.device_bytes, sum(size for _, size, _, _ in pieces), 1)
    bar, end, done = Text("["), 0, 0
    for _, size, mark, style in pieces:
        end += size
        cells = round(end / total * _BAR) - done
        bar.append(mark * cells, style)
        done += cells
    console.print(bar.append(f"] {budget.device_bytes / _GIB:.2f} GiB"))
    each = "" if report.question.situation.ranks == 1 else f"  (each of {report.question.situation.ranks} devices)"
    console.print(
        Text("  ").join(Text(f"{mark} {name} {human_bytes(size)}", style) for name, size, mark, style in pieces)
    )
    console.print(f"the engine takes {human_bytes(budget.allowed_bytes)}: {budget.allowed_rule}{each}")
    for part in budget.parts:
        beside = "" if part.inside else ", beside the share"
        low, high = part.bytes.low / _GIB, part.bytes.high / _GIB
        span = "" if low == high else f" [{low:.2f} .. {high:.2f}]"
        console.print(
            f"  {part.name:<14} {part.bytes.likely / _GIB:7.2f} GiB{span}  {part.bytes.source}{beside}", style="dim"
        )


def _limits(console: Console, report: Report) -> None:
    now, asked = report.answer, report.question.workload
    capacity, assumed = now.capacity, _assumed(report)
    console.print(
        f"  KV: {capacity.num_blocks:,} blocks of {capacity.block_bytes:,} bytes; a request of {asked.context:,} "
        f"tokens takes {capacity.request_bytes:,} bytes ({human_bytes(capacity.request_bytes)}){assumed}"
    )
    console.print(f"  longest context for {asked.concurrency:,} at once: {report.longest_context:,} tokens{assumed}")
    console.print(f"  most at once with {asked.context:,} tokens:  {report.most_requests:,} requests{assumed}")
    if asked.shared_prefix:
        step = capacity.reuse_step
        if step and asked.shared_prefix >= step and now.saved_bytes:
            text = f"saves {now.saved_bytes:,} bytes ({human_bytes(now.saved_bytes)})"
        elif step and asked.shared_prefix < step:
            text = f"is never reused: the engine reuses prefixes in steps of {step:,} tokens"
        elif asked.concurrency == 1:
            text = "saves no memory with one request at a time; a later one need not compute it again"
        else:
            text = "saves no memory: this engine keeps a copy for each request"
        console.print(f"  the shared prefix of {asked.shared_prefix:,} tokens {text}{assumed}")
    _offload(console, report)


def _offload(console: Console, report: Report) -> None:
    found = report.offload
    if found.recompute_seconds is None or found.ram_seconds is None:
        return
    console.print(
        f"  a prefix of {found.tokens:,} tokens: {_seconds(found.recompute_seconds)} to compute, "
        f"{_seconds(found.ram_seconds)} to load from RAM, {_seconds(found.ssd_seconds)} from an SSD at 3 GB/s"
        f"{'; an offload tier pays' if found.pays else ''}{_assumed(report)}"
    )


def _ways(console: Console, report: Report) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title=f"Ways out{_assumed(report)}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column, justify in (
        ("change", "left"),
        ("fits", "left"),
        ("at once", "right"),
        ("needs each", "right"),
        ("has each", "right"),
    ):
        table.add_column(column, justify="right" if justify == "right" else "left")
    table.add_column("takes away")
    for way in report.ways_out:
        then = way.answer
        table.add_row(
            way.change,
            "yes" if way.enough else "no",
            f"{then.requests:,}",
            human_bytes(then.needed_bytes),
            human_bytes(then.available_bytes),
            way.cost,
            style="green" if way.enough else "",
        )
    console.print(table)


def _kv_types(console: Console, report: Report, measured: QualityFile | None) -> None:
    """What each type of KV cache holds."""
    from rich import box
    from rich.table import Table

    if len(report.kv_types) < 2:
        return
    own = report.kv_types[0]
    table = Table(
        title=f"KV cache by type{_assumed(report)}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in ("type", "tokens", "at once", "gain"):
        table.add_column(column, justify="left" if column == "type" else "right")
    if measured is not None:
        table.add_column(f"measured for {measured.model}")
    for each in report.kv_types:
        row = [each.name, f"{each.tokens:,}", f"{each.requests:,}", f"{own.block_bytes / each.block_bytes:.2f}x"]
        if measured is not None:
            row.append(measured.measured.get(each.name, "-"))
        table.add_row(*row, style="bold" if each.chosen else "")
    console.print(table)


def _settings(console: Console, report: Report) -> None:
    if not report.recommended:
        return
    console.print("\nSet")
    for setting in report.recommended:
        console.print(f"  {setting.name:<24} {setting.value:<8} {setting.why}{_assumed(report)}")
    rule = report.rule
    console.print(f"  the 1.2x rule ({rule.max_model_len:,}): {rule.verdict}{_assumed(report)}")


def _grid(console: Console, report: Report) -> None:
    from rich.text import Text

    from anaphora.planning.heatmap import colour, text_of
    from anaphora.planning.plan import grid

    contexts, concurrencies, rows = grid(report.question)
    console.print(
        "\nPart of the KV memory, by context (rows) and requests at once (columns); above 100% it does not fit"
    )
    console.print(f"{'':>9}" + "".join(f"{count:>8,}" for count in concurrencies))
    for context, row in zip(contexts, rows, strict=True):
        line = Text(f"{context:>9,}")
        for part in row:
            line.append(f"{text_of(part):>7} ", f"black on {colour(part)}")
        console.print(line)


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
