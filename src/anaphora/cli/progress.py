"""Progress of fetching a model, on stderr: a bar on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anaphora.engine.sources.cache import Progress
    from anaphora.engine.sources.resolve import ModelFolder


def resolve_with_progress(name: str, *, force: bool = False, verify: bool = False) -> ModelFolder:
    """`engine.sources.resolve_model` with its progress shown; raises what that raises."""
    from anaphora.engine.sources.resolve import resolve_model

    with shown_progress() as progress:
        return resolve_model(name, progress=progress, force=force, verify=verify)


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """A callback (stage, bytes done, bytes in all or None) that shows bytes, rate and time left."""
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.DownloadColumn(binary_units=True),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
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


def _lines() -> Progress:
    current = ""

    def show(stage: str, _done: int, total: int | None) -> None:
        nonlocal current
        if stage != current:
            current = stage
            size = f" ({total:,} bytes)" if total else ""
            print(f"{stage}{size}", file=sys.stderr, flush=True)

    return show
