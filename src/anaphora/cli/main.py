"""The `anaphora` command. Each command lives in the module of its name, which is imported when it is asked for."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from anaphora import __version__
from anaphora.errors import AnaphoraError

COMMANDS = (
    "serve",
    "generate",
    "pull",
    "kv",
    "plan",
    "models",
    "hardware",
    "verify",
    "sweep",
    "replay",
    "quality",
    "doctor",
    "explain",
    "cache",
    "info",
)


class _Lazy(click.Group):
    """A group that imports a command's module only for that command, so that each starts as fast as it can."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"anaphora.cli.{cmd_name}"), cmd_name)
        return command


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="anaphora %(version)s")
def cli() -> None:
    """An LLM inference server and toolkit built around the KV cache."""


def main() -> None:
    """Entry point: errors of ours become one message on stderr and their exit code, never a traceback."""
    try:
        cli()
    except AnaphoraError as error:
        click.echo(f"anaphora: {error}", err=True)
        sys.exit(error.exit_code)
