"""`anaphora sweep URL`: how much can that server take, and what limits it?"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from anaphora.cli.probe_options import (
    Progress,
    endpoint_options,
    make_endpoint,
    output_options,
    run_until_interrupted,
    write_html,
)
from anaphora.errors import ConfigError

if TYPE_CHECKING:
    from anaphora.probes.endpoint import Endpoint
    from anaphora.probes.sweep import Sweep
    from anaphora.probes.verify.prompts import Scale
    from anaphora.probes.workload import TraceRow, Workload

F = TypeVar("F", bound=Callable[..., Any])
_FILE = click.Path(path_type=Path)

_LOAD: tuple[Callable[[F], F], ...] = (
    click.option("--concurrency", help="Requests in flight: 1:64 doubles, 8:64:8 adds, 1,2,4. Default: 1:64."),
    click.option("--rate", help="Poisson arrivals per second instead (open loop), in the same forms."),
    click.option("--prompt-tokens", default="512", show_default=True, help="Length, or uniform:A-B, normal:MEAN,SD."),
    click.option("--output-tokens", default="128", show_default=True, help="Likewise, or lognormal:MEDIAN,SIGMA."),
    click.option("--shared-prefix", type=click.IntRange(0), default=0, help="Tokens at the head of every prompt."),
    click.option("--trace", type=_FILE, help="Of `anaphora replay`: lengths and shared prefixes."),
    click.option("--trace-scale", type=click.FloatRange(0, min_open=True), default=1.0, help="Factor of its lengths."),
    click.option("--slo", metavar="LIMITS", help="Count goodput under limits: ttft=500ms,itl=50ms (also tpot, e2e)."),
    click.option("--plan", type=_FILE, help="JSON of `anaphora plan`: compare its prediction."),
)
_BOUNDS: tuple[Callable[[F], F], ...] = (
    click.option(
        "--precision", type=click.FloatRange(0.001, 1), default=0.05, show_default=True,
        help="A step ends when the median TTFT is known to this share.",
    ),
    click.option(
        "--step-seconds", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True,
        help="... or after this time.",
    ),
    click.option(
        "--step-requests", type=click.IntRange(20), default=500, show_default=True, help="... or so many requests."
    ),
    click.option(
        "--max-seconds", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True, help="In all."
    ),
    click.option("--max-requests", type=click.IntRange(1), default=10_000, show_default=True, help="In all."),
    click.option("--seed", type=int, help="Of prompts and arrivals. Default: a new one, so that nothing is cached."),
)  # fmt: skip


def _options(function: F) -> F:
    for option in reversed((*_LOAD, *_BOUNDS)):
        function = option(function)
    return function


@click.command()
@click.argument("url")
@_options
@endpoint_options
@output_options
def sweep(
    url: str,
    api_key: str | None,
    model: str | None,
    header: tuple[str, ...],
    timeout: float,
    as_json: bool,
    html: Path | None,
    **options: Any,
) -> None:
    """Sweep the load on the OpenAI-compatible server at URL: find the knee, and what limits the server there.

    Exit code 0; 1: the --slo holds at no load; 3: the server failed.
    """
    from anaphora.probes.client import ProbeClient
    from anaphora.probes.report import to_json
    from anaphora.probes.sweep import MOST_IN_FLIGHT, measure
    from anaphora.probes.sweep_report import as_dict, exit_code, html_page

    endpoint = make_endpoint(url, api_key, model, header, timeout)
    if endpoint.proxy.note:
        click.echo(endpoint.proxy.note, err=True)
    state = _make(options)

    async def run(progress: Progress) -> None:
        async with ProbeClient(endpoint, max_connections=MOST_IN_FLIGHT) as client:
            await measure(state, client, progress)

    interrupted = run_until_interrupted(run)
    if html is not None:
        write_html(html, html_page(state, endpoint))
    if as_json:
        click.echo(to_json(as_dict(state, endpoint, interrupted=interrupted), endpoint))
    else:
        _print(endpoint, state, interrupted)
    sys.exit(exit_code(state))


def _make(options: dict[str, Any]) -> Sweep:
    """From the options. Raises ConfigError."""
    import secrets

    from anaphora.probes.figures import ServiceLevel
    from anaphora.probes.predicted import read_plan
    from anaphora.probes.step import StepBounds
    from anaphora.probes.sweep import Loads, Sweep

    if options["concurrency"] and options["rate"]:
        raise ConfigError("--concurrency and --rate exclude each other: a closed loop or an open one")
    loads = (
        Loads.parse(options["rate"], "rate")
        if options["rate"]
        else Loads.parse(options["concurrency"] or "1:64", "concurrency")
    )
    seed = secrets.randbelow(2**32) if options["seed"] is None else options["seed"]
    return Sweep(
        loads,
        _workload(options, seed),
        ServiceLevel.parse(options["slo"]) if options["slo"] else None,
        read_plan(options["plan"]) if options["plan"] else None,
        StepBounds(options["precision"], options["step_seconds"], options["step_requests"]),
        options["max_seconds"],
        options["max_requests"],
        seed,
    )


def _workload(options: dict[str, Any], seed: int) -> Callable[[Scale], Workload]:
    from anaphora.probes.workload import Lengths, SyntheticWorkload, TraceWorkload

    if options["trace"] is not None:
        (rows, block_size), factor = _read_trace(options["trace"]), options["trace_scale"]
        return lambda scale: TraceWorkload(rows, scale, block_size=block_size, factor=factor, seed=seed)
    prompt = Lengths.parse(options["prompt_tokens"], "--prompt-tokens")
    output = Lengths.parse(options["output_tokens"], "--output-tokens")
    shared = options["shared_prefix"]
    return lambda scale: SyntheticWorkload(prompt, output, scale, shared_prefix=shared, seed=seed)


def _read_trace(path: Path) -> tuple[list[TraceRow], int]:
    """(rows, tokens of a block). Raises InputError for the first line that is wrong."""
    from anaphora.probes.workload import TraceRow
    from anaphora.replay.readers.base import ReadReport
    from anaphora.replay.readers.source import read_trace
    from anaphora.replay.spool import chained

    rows, block_size = [], 1
    for request in read_trace(path, ReadReport(), strict=True):
        if request.token_ids is not None:
            raise ConfigError(f"--trace {path} is a chat log; a sweep takes lengths: give a trace or a request log")
        block_size = request.block_size or block_size
        names = (int.from_bytes(name, "little") for name in chained(request, block_size))
        rows.append(TraceRow(request.input_length, request.output_length, tuple(names)))
    if not rows:
        raise ConfigError(f"--trace {path} holds no requests; give one with at least one")
    return rows, block_size


def _print(endpoint: Endpoint, state: Sweep, interrupted: bool) -> None:
    from rich.console import Console

    from anaphora.cli.tables import print_table
    from anaphora.probes import sweep_report as report
    from anaphora.probes.report import subtitle

    knee = state.knee()
    limit = state.limit(knee)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(subtitle(endpoint, state.engine, state.model), style="dim")
    if interrupted:
        console.print("Interrupted; this is what was measured until then.", style="yellow")
    console.print(f"\n{endpoint.redact(report.headline(state, knee, limit))}\n", style="bold")
    for fact in report.facts(state, knee, limit):
        console.print(f"- {endpoint.redact(fact)}")
    if state.steps:
        console.print()
        print_table(*report.times_table(state), "")
        print_table(*report.rates_table(state), report.caption(state))
