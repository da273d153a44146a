"""The `anaphora` command: one thin module per command, imported here without torch."""

from __future__ import annotations

import sys

import click

from anaphora import __version__
from anaphora.cli.doctor import doctor
from anaphora.cli.generate import generate
from anaphora.cli.hardware import hardware
from anaphora.cli.kv import kv
from anaphora.cli.models import models
from anaphora.cli.plan import plan
from anaphora.cli.pull import pull
from anaphora.cli.serve import serve
from anaphora.cli.sweep import sweep
from anaphora.cli.verify import verify
from anaphora.errors import AnaphoraError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="anaphora %(version)s")
def cli() -> None:
    """An LLM inference server and toolkit built around the KV cache."""


cli.add_command(serve)
cli.add_command(generate)
cli.add_command(pull)
cli.add_command(kv)
cli.add_command(plan)
cli.add_command(models)
cli.add_command(hardware)
cli.add_command(verify)
cli.add_command(sweep)
cli.add_command(doctor)


def main() -> None:
    """Entry point: errors of ours become one message on stderr and their exit code, never a traceback."""
    try:
        cli()
    except AnaphoraError as error:
        click.echo(f"anaphora: {error}", err=True)
        sys.exit(error.exit_code)
