"""Tables and JSON of the listing commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

PIPE_WIDTH = 200
"""Columns of a table that goes into a pipe or file, where there is no window to fit."""


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> None:
    """A table on stdout; a column whose title starts with ">" is aligned right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False)
    for column in columns:
        table.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, markup=False).print(table)


def print_json(key: str, rows: Sequence[dict[str, Any]]) -> None:
    """One JSON object on stdout: schema_version and the rows under `key`."""
    print_object({key: rows})


def print_object(facts: dict[str, Any]) -> None:
    """One JSON object on stdout: schema_version and the facts."""
    click.echo(json.dumps({"schema_version": 1, **facts}, indent=2))
