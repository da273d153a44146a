"""`anaphora verify URL`: does prefix caching work there, and how much does it save?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from anaphora.cli.probe_options import (
    Progress,
    endpoint_options,
    make_endpoint,
    output_options,
    run_until_interrupted,
    write_html,
)

if TYPE_CHECKING:
    from anaphora.probes.endpoint import Endpoint
    from anaphora.probes.verify.divergence import Divergence
    from anaphora.probes.verify.own_prompts import OwnPrompts
    from anaphora.probes.verify.run import Verification


@click.command()
@click.argument("url")
@click.option("--prefix-tokens", type=click.IntRange(64), default=2000, show_default=True, help="Shared prefix.")
@click.option("--trials", type=click.IntRange(6), default=24, show_default=True, help="Most rounds of three requests.")
@click.option("--seed", type=int, help="Of the random prompts. Default: a new one, so that nothing can be cached.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="Replay these instead: JSONL of chat requests, or a text file with one prompt a line.",
)
@endpoint_options
@output_options
def verify(
    url: str,
    prefix_tokens: int,
    trials: int,
    seed: int | None,
    prompts: Path | None,
    api_key: str | None,
    model: str | None,
    header: tuple[str, ...],
    timeout: float,
    as_json: bool,
    html: Path | None,
) -> None:
    """Verify prefix caching of the OpenAI-compatible server at URL, with statistics.

    Sends some 20 to 100 chats of --prefix-tokens tokens, each answered by one token, and times the first one of each.

    Exit code 0: it works; 1: it does not, or only sometimes; 3: it cannot be told, or the server failed.
    """
    import secrets

    endpoint = make_endpoint(url, api_key, model, header, timeout)
    if endpoint.proxy.note:
        click.echo(endpoint.proxy.note, err=True)
    if prompts is not None:
        sys.exit(_own(endpoint, prompts, as_json, html))
    from anaphora.probes.verify.run import Verification

    state = Verification(secrets.randbelow(2**32) if seed is None else seed, prefix_tokens, trials)
    sys.exit(_synthetic(endpoint, state, as_json, html))


def _synthetic(endpoint: Endpoint, state: Verification, as_json: bool, html: Path | None) -> int:
    from anaphora.probes.client import ProbeClient
    from anaphora.probes.report import to_json
    from anaphora.probes.verify import report
    from anaphora.probes.verify.run import measure

    async def run(progress: Progress) -> None:
        async with ProbeClient(endpoint) as client:
            await measure(state, client, progress)

    interrupted = run_until_interrupted(run)
    if html is not None:
        write_html(html, report.html_page(state, endpoint))
    if as_json:
        click.echo(to_json(report.as_dict(state, endpoint, interrupted=interrupted), endpoint))
    else:
        _print(endpoint, state, interrupted)
    return report.exit_code(state)


def _print(endpoint: Endpoint, state: Verification, interrupted: bool) -> None:
    from rich.console import Console

    from anaphora.cli.tables import print_table
    from anaphora.probes.report import subtitle
    from anaphora.probes.verify import report

    verdict = state.verdict()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(subtitle(endpoint, state.engine, state.model), style="dim")
    if interrupted:
        console.print("Interrupted; this is what was measured until then.", style="yellow")
    style = {"works": "bold green", "cannot tell": "bold yellow"}.get(verdict.answer, "bold red")
    console.print(f"\n{report.headline(verdict)}\n", style=style)
    for fact in report.facts(state):
        console.print(f"- {endpoint.redact(fact)}")
    for finding in state.findings():
        console.print(f"\n{'!' if finding.severity == 'problem' else 'i'} {finding.what}", style="bold", end=" ")
        console.print(finding.fix)
    if verdict.ratio is not None:
        console.print()
        print_table(("witness", ">cold", ">warm", ">control"), report.witness_rows(state), f"Seed {state.seed}.")


def _own(endpoint: Endpoint, path: Path, as_json: bool, html: Path | None) -> int:
    from anaphora.probes.client import ProbeClient
    from anaphora.probes.report import to_json
    from anaphora.probes.verify import report
    from anaphora.probes.verify.own_prompts import OwnPrompts, load_requests, measure_own

    state = OwnPrompts(load_requests(path))

    async def run(progress: Progress) -> None:
        async with ProbeClient(endpoint) as client:
            await measure_own(state, client, progress)

    interrupted = run_until_interrupted(run)
    if html is not None:
        write_html(html, report.own_html_page(state, endpoint))
    if as_json:
        click.echo(to_json(report.own_as_dict(state, endpoint, interrupted=interrupted), endpoint))
    else:
        _print_own(endpoint, state, interrupted)
    return report.own_exit_code(state)


def _print_own(endpoint: Endpoint, state: OwnPrompts, interrupted: bool) -> None:
    from rich.console import Console

    from anaphora.cli.tables import print_table
    from anaphora.probes.report import subtitle
    from anaphora.probes.verify import report

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(subtitle(endpoint, state.engine, state.model), style="dim")
    if interrupted or state.failure is not None:
        console.print(f"Ended early{f': {state.failure}' if state.failure else ''}.", style="yellow")
    console.print(f"\n{report.own_headline(state)}", style="bold")
    print_table(report.OWN_COLUMNS, report.own_rows(state), "Reused: tokens. Again: the same prompt a second time.")
    for result in state.results():
        if result.divergence is not None:
            _print_divergence(console, endpoint, result.number, result.divergence)


def _print_divergence(console: object, endpoint: Endpoint, number: int, found: Divergence) -> None:
    from rich.console import Console
    from rich.text import Text

    assert isinstance(console, Console)
    console.print(f"\nPrompt {number} parts from prompt {found.nearest + 1}: {found.cause.name}", style="bold")
    for who, differing, after in (("this   ", found.mine, found.after), ("earlier", found.theirs, "")):
        shown = Text(f"  {who} …{_visible(endpoint.redact(found.before))}")
        shown.append(f"[{_visible(endpoint.redact(differing))}]", style="reverse")
        shown.append(f"{_visible(endpoint.redact(after))}…")
        console.print(shown)
    if found.cause.fix:
        console.print(f"  Fix: {found.cause.fix}")


def _visible(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥")
