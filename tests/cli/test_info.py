from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
from click.testing import CliRunner

from anaphora import __version__, native
from anaphora.cli.main import cli
from anaphora.errors import ConfigError


def run(*args: str) -> str:
    result = CliRunner().invoke(cli, ["info", *args], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stderr == ""
    return result.stdout


def read() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(run("--json"))
    return facts


def test_the_facts_as_json() -> None:
    facts = read()
    kernels = native.load()
    assert kernels is not None
    assert facts["schema_version"] == 1
    assert facts["version"] == __version__
    assert facts["packages"]["torch"] == version("torch")
    assert facts["native"] == {
        "available": True,
        "reason": None,
        "target": kernels.target(),
        "targets": kernels.targets(),
        "threads": kernels.threads(),
    }
    assert facts["cpu"]["usable_cores"] == native.usable_cores()


def test_the_facts_as_text() -> None:
    text = run()
    kernels = native.load()
    assert kernels is not None
    assert f"native kernels  {kernels.target()} on {kernels.threads()} threads" in text
    assert f"torch           {version('torch')}" in text


def test_without_kernels_it_says_what_to_do() -> None:
    """A new process in which the module cannot be found."""
    code = (
        "import sys; sys.modules['anaphora._native'] = None\n"
        "from anaphora.cli.main import main; sys.argv = ['anaphora', 'info']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "native kernels  no native kernels (" in done.stdout
    assert "apt-get install g++" in done.stdout


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANAPHORA_THREADS", "many")
    native.load.cache_clear()
    try:
        with pytest.raises(ConfigError, match="ANAPHORA_THREADS=many"):
            CliRunner().invoke(cli, ["info"], catch_exceptions=False)
    finally:
        monkeypatch.undo()
        native.load.cache_clear()
