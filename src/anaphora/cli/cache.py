"""`anaphora cache`: look after the folder of a disk tier."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from anaphora.cli.options import Bytes
from anaphora.errors import ConfigError

if TYPE_CHECKING:
    from anaphora.tiers.maintenance import Scrub

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

_folder = click.argument("directory", type=click.Path(path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


class Age(click.ParamType[int]):
    """A length of time such as 7d, in seconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d{1,9})([smhdw])", str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no age; write a number and s, m, h, d or w, such as 7d", param, ctx)
        return int(found[1]) * _SECONDS[found[2]]


@click.group()
def cache() -> None:
    """Look after the folder of a disk cache (`serve --disk-cache`)."""


@cache.command()
@_folder
@_json
def stats(directory: Path, as_json: bool) -> None:
    """Show what DIRECTORY holds, by model. No block is read; a server may use the folder."""
    _needs_xxhash()
    from anaphora.cli.tables import print_table
    from anaphora.geometry.units import human_bytes
    from anaphora.tiers.maintenance import survey

    found = survey(directory)
    if as_json:
        _print("stats", directory, asdict(found))
        return
    held = "a server uses it now" if found.held else "no server uses it now"
    rows = [
        (
            space.model,
            space.codec,
            f"{space.blocks:,}",
            f"{space.tokens:,}",
            human_bytes(space.payload_bytes),
            human_bytes(space.file_bytes),
            _date(space.oldest),
            _date(space.newest),
        )
        for space in found.spaces
    ]
    columns = ("model", "codec", ">blocks", ">tokens", ">KV", ">files", "oldest", "newest")
    print_table(columns, rows, f"{found.used_bytes:,} bytes ({human_bytes(found.used_bytes)}); {held}")
    for line in found.unreadable:
        click.echo(f"damaged: {line}")


@cache.command()
@_folder
@_json
def verify(directory: Path, as_json: bool) -> None:
    """Read every block of DIRECTORY and check it. Exit status 1 when one is damaged.

    Damaged blocks are removed, unless a server uses the folder (it drops them itself when it reads them) or it
    cannot be written.
    """
    _needs_xxhash()
    from anaphora.geometry.units import human_bytes
    from anaphora.tiers.maintenance import scrub

    found = scrub(directory, _progress("verified"))
    if as_json:
        _print("verify", directory, asdict(found))
    else:
        click.echo(
            f"{found.blocks:,} blocks are whole ({found.payload_bytes:,} bytes of KV, "
            f"{human_bytes(found.payload_bytes)})"
        )
        for line in found.corrupt:
            click.echo(f"damaged: {line}")
        if found.corrupt:
            click.echo(f"{len(found.corrupt):,} damaged, {_what_became(found)}")
    if found.corrupt:
        sys.exit(1)


@cache.command()
@_folder
@click.option("--older-than", type=Age(), help="Only blocks stored longer ago than this, such as 7d or 12h.")
@click.option("--model", help="Only blocks of this model, by the name `anaphora cache stats` shows.")
@_json
def clear(directory: Path, older_than: int | None, model: str | None, as_json: bool) -> None:
    """Remove the blocks of DIRECTORY: all, or those that meet every condition. No server may use the folder."""
    _needs_xxhash()
    from anaphora.tiers import maintenance
    from anaphora.tiers.record import Record
    from anaphora.tiers.segment import Segment

    before = time.time() - older_than if older_than is not None else None

    def keep(segment: Segment, record: Record) -> bool:
        if model is not None and segment.space.model != model:
            return True
        return before is not None and record.stored_at > before

    if model is not None:
        known = sorted({space.model for space in maintenance.survey(directory).spaces})
        if model not in known:
            raise ConfigError(
                f"{directory} holds nothing of {model!r}; it holds {', '.join(known) or 'nothing at all'}"
            )
    removed = maintenance.clear(directory, keep)
    if as_json:
        _print("clear", directory, {"removed_blocks": removed})
    else:
        click.echo(f"{removed:,} blocks removed")


@cache.command()
@_folder
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@_json
def export(directory: Path, file: Path, as_json: bool) -> None:
    """Write every whole block of DIRECTORY into FILE, for `anaphora cache import` elsewhere. A server may go on."""
    _needs_xxhash()
    from anaphora.tiers import archive

    moved = archive.export(directory, file, _progress("written"))
    if as_json:
        _print("export", directory, {"file": str(file), "file_bytes": file.stat().st_size, **asdict(moved)})
    else:
        click.echo(f"{moved.blocks:,} blocks written to {file} ({file.stat().st_size:,} bytes)")
    if moved.skipped:
        click.echo(f"{moved.skipped:,} damaged ones were left out; see `anaphora cache verify {directory}`", err=True)
        sys.exit(1)


@cache.command(name="import")
@_folder
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--limit", type=Bytes(), help="Most bytes DIRECTORY may take. Default: what it takes to hold it all.")
@_json
def import_(directory: Path, file: Path, limit: int | None, as_json: bool) -> None:
    """Store the blocks of FILE in DIRECTORY, which is made if need be. No server may use the folder.

    Take files only from those whose computing you trust: checksums show damage, not forgery.
    """
    _needs_xxhash()
    from anaphora.tiers import archive

    moved = archive.load(directory, file, limit, _progress("stored"))
    if as_json:
        _print("import", directory, {"file": str(file), **asdict(moved)})
    else:
        click.echo(f"{moved.blocks:,} blocks stored in {directory}")
    if moved.skipped:
        click.echo(
            f"{moved.skipped:,} blocks found no room; give a larger --limit, or free space on that disk", err=True
        )
    if moved.damage:
        click.echo(f"{file} is damaged ({moved.damage}); what stood before that was stored", err=True)
    if moved.skipped or moved.damage:
        sys.exit(1)


def _print(action: str, directory: Path, fields: dict[str, Any]) -> None:
    head = {"schema_version": 1, "command": f"cache {action}", "directory": str(directory)}
    click.echo(json.dumps({**head, **fields}, indent=2))


def _what_became(found: Scrub) -> str:
    """Of damaged blocks."""
    if found.removed:
        return "removed"
    if found.held:
        return "left to the server that uses the folder, which drops what it reads"
    return "left there, because this user cannot write to the folder"


def _progress(word: str) -> Callable[[int], None]:
    """Counts on a terminal's stderr, once in a thousand blocks."""

    def tell(blocks: int) -> None:
        if blocks % 1000 == 0 and sys.stderr.isatty():
            click.echo(f"\r{blocks:,} blocks {word}", nl=False, err=True)

    return tell


def _date(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else "-"


def _needs_xxhash() -> None:
    from importlib.util import find_spec

    if find_spec("xxhash") is None:
        raise ConfigError(
            "this command needs xxhash, which the light install leaves out: pip install 'anaphora[tiers]'"
        )
