"""Options that verify, sweep and doctor share, and how they run: progress on stderr, Ctrl-C keeps what was measured."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from anaphora.errors import ConfigError

if TYPE_CHECKING:
    from anaphora.probes.endpoint import Endpoint

F = TypeVar("F", bound=Callable[..., Any])

Progress = Callable[[str, int, int | None], None]
"""Called with (stage, steps done, steps in all or None where nobody knows)."""

ENDPOINT_OPTIONS: tuple[Callable[[F], F], ...] = (
    click.option("--api-key", envvar="ANAPHORA_API_KEY", help="Key to send; shown nowhere."),
    click.option("--model", help="Model id. Default: the only one served."),
    click.option("--header", multiple=True, help="Extra header, as 'Name: value'; repeatable."),
    click.option(
        "--timeout", type=click.FloatRange(0, min_open=True), default=120.0, show_default=True,
        help="Seconds without any byte before a request is given up.",
    ),
)  # fmt: skip

OUTPUT_OPTIONS: tuple[Callable[[F], F], ...] = (
    click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout."),
    click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a report with plots here."),
)


def endpoint_options(function: F) -> F:
    """--api-key, --model, --header, --timeout."""
    for option in reversed(ENDPOINT_OPTIONS):
        function = option(function)
    return function


def output_options(function: F) -> F:
    """--json and --html."""
    for option in reversed(OUTPUT_OPTIONS):
        function = option(function)
    return function


def make_endpoint(
    url: str, api_key: str | None, model: str | None, header: tuple[str, ...], timeout: float
) -> Endpoint:
    """Raises ConfigError."""
    from anaphora.probes.endpoint import Endpoint

    return Endpoint.parse(url, api_key=api_key, model=model, headers=header, timeout=timeout)


def run_until_interrupted(measure: Callable[[Progress], Awaitable[None]], *, quiet: bool = False) -> bool:
    """Run a probe with its progress on stderr. True when Ctrl-C ended it early; a second Ctrl-C ends the process.

    `measure` keeps its results in an object of its own, so that whatever it had is still there.
    """
    import asyncio

    async def main(progress: Progress) -> bool:
        try:
            await measure(progress)
        except asyncio.CancelledError:
            return True
        return False

    with shown_steps(quiet=quiet) as progress:
        return asyncio.run(main(progress))


@contextmanager
def shown_steps(*, quiet: bool = False) -> Iterator[Progress]:
    """A bar with counts on a terminal, one line per stage elsewhere, nothing when quiet."""
    if quiet:
        yield lambda _stage, _done, _total: None
        return
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _stage_lines()
        return
    columns = (
        rich.SpinnerColumn(),
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
    )
    with rich.Progress(*columns, console=console, transient=True) as bar:
        task, current = bar.add_task("", total=None), ""

        def show(stage: str, done: int, total: int | None) -> None:
            nonlocal current
            if stage != current:
                current = stage
                bar.reset(task, description=stage)
            bar.update(task, completed=done, total=total)

        yield show


def write_html(path: Path, text: str) -> None:
    """Raises ConfigError where the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror}; give a file in a folder that exists") from None


def _stage_lines() -> Progress:
    current = ""

    def show(stage: str, _done: int, _total: int | None) -> None:
        nonlocal current
        if stage != current:
            current = stage
            print(stage, file=sys.stderr, flush=True)

    return show
