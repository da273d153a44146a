"""`anaphora replay TRACE`: what a cache of which size, policy and tiers would have done for that traffic."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from anaphora.cli.options import FiniteRange
from anaphora.cli.probe_options import output_options, shown_steps, write_html

if TYPE_CHECKING:
    from anaphora.replay.readers.base import ReadReport

F = TypeVar("F", bound=Callable[..., Any])
_RATE = FiniteRange(0, min_open=True)
_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)

_TRACE: tuple[Callable[[F], F], ...] = (
    click.option("--format", "form", help="mooncake, bailian, chats, anaphora or azure. Default: by the first lines."),
    click.option("--strict", is_flag=True, help="Fail on the first line that cannot be used."),
    click.option("--tokenizer", type=_FOLDER, help="Model folder: splits a chat log as that model's server does."),
    click.option(
        "--block-size", type=click.IntRange(1, 4096), default=16, show_default=True, help="Tokens, for chat logs."
    ),
)
_CACHE: tuple[Callable[[F], F], ...] = (
    click.option("--policy", "policies", multiple=True, help="Repeatable, or a,b,c, or all. Default: lru and serve's."),
    click.option("--sizes", help="Blocks or sizes such as 5000,20GiB. Default: from few to all that help."),
    click.option("--kv-memory", help="Pool in front of the tiers: blocks or a size."),
    click.option("--ram-cache", help="RAM tier: blocks or a size."),
    click.option("--disk-cache", help="Disk tier: blocks or a size."),
    click.option("--remote-cache", help="Remote store: blocks or a size."),
    click.option(
        "--cache-write-policy", type=click.Choice(["write-through", "on-eviction"]), default="write-through",
        show_default=True, help="When blocks go to the tiers.",
    ),
    click.option("--ram-eviction-policy", help="What goes when RAM is full. Default: as the last --policy."),
    click.option("--disk-eviction-policy", help="What goes when the disk is full. Default: as the last --policy."),
    click.option("--bounded", is_flag=True, help="Only --sizes; memory then grows with them, not with the trace."),
    click.option("--jobs", type=click.IntRange(1), help="Processes. Default: the cores allowed."),
)  # fmt: skip
_COSTS: tuple[Callable[[F], F], ...] = (
    click.option("--model", help="Folder, config.json, .gguf or name: bytes per token, and work per token."),
    click.option("--kv-dtype", default="bfloat16", show_default=True, help="Of the cache, as in `anaphora kv`."),
    click.option("--hardware", help="A device of `anaphora hardware`, for the speed of prefill."),
    click.option("--count", type=click.IntRange(1), default=1, show_default=True, help="Devices that share the work."),
    click.option("--prefill-speed", type=_RATE, help="Measured: prompt tokens per second. Replaces --hardware."),
    click.option("--ram-speed", type=_RATE, default=10.0, show_default=True, help="GB/s from the RAM tier."),
    click.option("--disk-speed", type=_RATE, default=3.0, show_default=True, help="GB/s from disk."),
    click.option("--remote-speed", type=_RATE, default=1.0, show_default=True, help="GB/s from the remote store."),
    click.option("--worth", type=_RATE, help="Seconds of prefill an hour that a GiB must save."),
)


def _options(function: F) -> F:
    for option in reversed((*_TRACE, *_CACHE, *_COSTS)):
        function = option(function)
    return function


@click.command()
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@_options
@output_options
def replay(
    traces: tuple[Path, ...],
    form: str | None,
    strict: bool,
    tokenizer: Path | None,
    block_size: int,
    as_json: bool,
    html: Path | None,
    **options: Any,
) -> None:
    """Replay recorded traffic through the server's cache: what hits, by size, policy and tier, and what it saves.

    TRACE is one file or several (- is stdin), .gz and .zst too: Mooncake or Bailian JSONL, a log of OpenAI requests,
    Anaphora's request log, or Azure's CSV.

    Exit code 0; 1: the trace does not hold what is asked, or no size is worth --worth; 2: it cannot be read.
    """
    from anaphora.cli.replay_plan import check, make_plan
    from anaphora.cli.replay_text import print_study
    from anaphora.cli.replay_tokens import tokenizer_of
    from anaphora.replay.report import as_dict
    from anaphora.replay.spool import spooled
    from anaphora.replay.study import examine, read_all

    check(options)
    reports: list[tuple[Path, ReadReport]] = []
    with shown_steps() as progress:
        tokenize = tokenizer_of(tokenizer) if tokenizer is not None else None
        requests = read_all(traces, reports, progress, form=form, strict=strict, tokenize=tokenize)
        with spooled(requests, block_size) as spool:
            plan = make_plan(options, spool, options["jobs"] or _cores())
            study = examine(spool, plan, progress)
    if html is not None:
        from anaphora.cli.replay_page import html_page

        write_html(html, html_page(study, reports))
    if as_json:
        click.echo(json.dumps(as_dict(study, reports), indent=2, allow_nan=False))
    else:
        print_study(study, reports)
    unmet = plan.worth is not None and study.enough() is None
    sys.exit(1 if unmet or not spool.blocks else 0)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
