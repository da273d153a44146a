"""`anaphora explain URL | LOG`: what was reused of each prompt, and why the rest was not."""

from __future__ import annotations

import sys
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from anaphora.cli.probe_options import endpoint_options
from anaphora.errors import ConfigError, EndpointRefused, InputError, UnexpectedAnswer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.explain.outcome import Difference, Outcome
    from anaphora.explain.summary import Summary
    from anaphora.probes.endpoint import Endpoint


@click.command()
@click.argument("target", metavar="URL | LOG")
@click.option("--last", type=click.IntRange(1), default=20, show_default=True, help="Requests to show, newest first.")
@click.option("--id", "request_id", help="Only this request: the id of its answer, also in the header X-Request-Id.")
@endpoint_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def explain(
    target: str,
    last: int,
    request_id: str | None,
    api_key: str | None,
    model: str | None,
    header: tuple[str, ...],
    timeout: float,
    as_json: bool,
) -> None:
    """Say why prompts missed the prefix cache: of a running server (URL), or from its request log (LOG).

    Exit code 0: nothing to mend; 1: something is to be done about a miss; 3: the server failed.
    """
    from anaphora.explain.summary import Summary

    notes: list[str] = []
    summary = Summary()
    if _is_url(target):
        from anaphora.cli.probe_options import make_endpoint

        endpoint = make_endpoint(target, api_key, model, header, timeout)
        outcomes = _from_server(endpoint, last, request_id)
        summary.add(outcomes)
    else:
        outcomes = _from_log(Path(target), last, request_id, summary, notes)
    if as_json:
        _print_json(target, outcomes, summary, notes)
    else:
        _print(outcomes, summary, notes)
    sys.exit(1 if summary.something_to_do else 0)


def _is_url(target: str) -> bool:
    return target != "-" and not Path(target).exists() and ("://" in target or ":" in target)


def _from_server(endpoint: Endpoint, last: int, request_id: str | None) -> list[Outcome]:
    """Raises ProbeError, and InputError for an id that the server does not know."""
    import asyncio

    from anaphora.explain.outcome import from_dict
    from anaphora.probes.client import ProbeClient

    path = f"/explain?last={last}" if request_id is None else f"/explain/{quote(request_id, safe='')}"

    async def ask() -> Any:
        async with ProbeClient(endpoint) as client:
            return await client.json("GET", path)

    try:
        answer = asyncio.run(ask())
    except EndpointRefused as error:
        if error.status != 404:
            raise
        if request_id is not None and "outcome" in error.detail:
            raise InputError(error.detail) from None
        raise UnexpectedAnswer(
            "There is no /explain: this is not Anaphora's server, or an older one. To compare prompts from outside, "
            "use `anaphora verify URL --prompts FILE`.",
            kind="no_explain",
        ) from None
    try:
        return [from_dict(each) for each in answer["requests"]]
    except (KeyError, TypeError, ValueError) as error:
        raise UnexpectedAnswer(f"/explain answered in another shape ({error}).", kind="no_explain") from None


def _from_log(path: Path, last: int, request_id: str | None, summary: Summary, notes: list[str]) -> list[Outcome]:
    """The last ones, newest first; all are counted in `summary`, lines that cannot be used in `notes`."""
    from anaphora.replay.outcomes import read_outcomes
    from anaphora.replay.readers.base import ReadReport

    if str(path) != "-" and not path.exists():
        raise ConfigError(f"{path} is neither a file nor a URL; give http://HOST:PORT, or a log of serve --request-log")
    report = ReadReport()
    latest: deque[Outcome] = deque(maxlen=last)
    for outcome in read_outcomes(path, report):
        if request_id in (None, outcome.request_id, outcome.request_id.rpartition("-")[0]):
            latest.append(outcome)
            summary.add([outcome])
    notes += [f"line {number}: {why}" for number, why in report.malformed]
    if (unnamed := report.num_malformed - len(report.malformed)) > 0:
        notes.append(f"and {unnamed:,} more lines that cannot be used")
    if request_id is not None and not latest:
        raise InputError(f"{path} holds no request {request_id}; give the `id` of an answer")
    return list(reversed(latest))


def _print_json(target: str, outcomes: Sequence[Outcome], summary: Summary, notes: Sequence[str]) -> None:
    from dataclasses import asdict

    from anaphora.cli.tables import print_object
    from anaphora.explain.outcome import as_dict
    from anaphora.explain.wording import advice, reason

    rows = []
    for outcome in outcomes:
        row = as_dict(outcome)
        if outcome.miss is not None:
            row["miss"] |= {"reason": reason(outcome.miss), "advice": advice(outcome.miss)}
        rows.append(row)
    causes = [asdict(each) for each in summary.causes]
    facts = {"command": "explain", "source": target, "requests": rows, "num_requests": summary.requests}
    print_object({**facts, "causes": causes, "malformed": list(notes)})


def _print(outcomes: Sequence[Outcome], summary: Summary, notes: Sequence[str]) -> None:
    from anaphora.cli.tables import print_table

    if not outcomes:
        click.echo("No request yet.")
    else:
        print_table(_COLUMNS, map(_row, outcomes), "Tokens. Newest first.")
        for each in outcomes:
            if each.miss is not None and each.miss.difference is not None and each.miss.difference.mine is not None:
                _print_text(each.request_id, each.miss.difference)
        causes = [
            (
                f"{each.cause}: {each.kind}" if each.kind else each.cause,
                f"{each.requests:,}",
                f"{each.tokens:,}",
                each.advice,
            )
            for each in summary.causes
        ]
        columns = ("cause", ">requests", ">tokens", "what to do")
        print_table(columns, causes, f"Of {summary.requests:,} requests.")
    for note in notes:
        click.echo(note, err=True)


_COLUMNS = ("time", "request", ">prompt", ">reused", "from", "why the rest was computed")


def _row(outcome: Outcome) -> tuple[str, ...]:
    from anaphora.explain.wording import reason

    why = reason(outcome.miss) if outcome.miss is not None else ""
    return (
        datetime.fromtimestamp(outcome.time).strftime("%m-%d %H:%M:%S"),
        _visible(outcome.request_id),
        f"{outcome.prompt_tokens:,}",
        f"{outcome.reused_tokens:,}",
        _visible(", ".join(f"{name} {tokens:,}" for name, tokens in outcome.reused.items())),
        _visible(why + (f" (waited for {outcome.waited_for})" if outcome.waited_for else "")),
    )


def _print_text(request_id: str, found: Difference) -> None:
    """The text around a difference, where the server keeps it."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(_visible(request_id), style="bold")
    for who, differing, after in (("this   ", found.mine, found.after), ("earlier", found.theirs, "")):
        shown = Text(f"  {who} …{_visible(found.before)}")
        shown.append(f"[{_visible(differing)}]", style="reverse")
        shown.append(f"{_visible(after)}…")
        console.print(shown)


def _visible(text: str | None) -> str:
    """In one line; control characters, which a terminal would obey, are spelt out."""
    marks = {"\n": "⏎", "\t": "⇥"}
    return "".join(c if c.isprintable() else marks.get(c, f"\\x{ord(c):02x}") for c in text or "")
