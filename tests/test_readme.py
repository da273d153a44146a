"""The README says what the code does: its table of options is the code's own, its commands exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import click
from click.testing import CliRunner

from anaphora.cli.main import COMMANDS, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_options_is_the_codes_own() -> None:
    spec = importlib.util.spec_from_file_location("readme_flags", ROOT / "tools" / "readme_flags.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.with_table(README) == README, "run: python tools/readme_flags.py --write"
    assert "`--kv-memory`" in README


def test_every_command_line_in_the_readme_is_understood() -> None:
    """Each `anaphora ...` line is parsed by the command it names, without running it."""
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^(?:\$ )?(anaphora .+)$", README, re.MULTILINE)]
    assert len(lines) >= 4
    for _, name, *arguments in lines:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, name
        command.make_context(name, arguments, parent=click.Context(cli))


def test_every_link_of_the_readme_exists() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_command_has_help() -> None:
    for name in COMMANDS:
        result = CliRunner().invoke(cli, [name, "--help"])
        assert result.exit_code == 0, result.output
        assert "Usage:" in result.output
