"""`anaphora pull`: the path, the JSON, and what goes to stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from anaphora.cli.pull import pull
from anaphora.errors import CorruptModel, ModelNotFound


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANAPHORA_CACHE", str(tmp_path / "cache"))


def run(*args: str) -> tuple[str, str]:
    result = CliRunner().invoke(pull, args, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout, result.stderr


def test_stdout_is_the_path_and_stderr_the_progress(tiny_gguf: Path, tmp_path: Path) -> None:
    out, err = run(str(tiny_gguf))
    path = Path(out.strip())
    assert path.parent == tmp_path / "cache" / "models"
    assert (path / "model.safetensors").is_file()
    assert f"converting {tiny_gguf.name} to safetensors" in err.splitlines()
    assert run(str(tiny_gguf)) == (out, "")
    assert "converting" in run(str(tiny_gguf), "--force")[1]
    weights = path / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    assert "converting" not in run(str(tiny_gguf))[1]
    assert "converting" in run(str(tiny_gguf), "--verify")[1]


def test_json(tiny_gguf: Path) -> None:
    report = json.loads(run(str(tiny_gguf), "--json")[0])
    path = Path(report["path"])
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    assert report == {
        "schema_version": 1,
        "command": "pull",
        "name": "tiny-llama",
        "path": str(path),
        "source": f"gguf:{tiny_gguf}",
        "bytes": sum(sizes.values()),
        "files": [{"name": name, "bytes": size} for name, size in sorted(sizes.items())],
    }


def test_errors_are_raised_for_main_to_print(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="No model 'nope' here"):
        run("nope")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(CorruptModel, match=r"bad\.gguf"):
        run(str(tmp_path / "bad.gguf"))


def test_a_terminal_sees_bytes_rate_and_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from anaphora.cli.progress import shown_progress

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with shown_progress() as progress:
        progress("downloading x.whl", 0, None)
        progress("downloading x.whl", 3 << 20, 6 << 20)
    shown = click.unstyle(capsys.readouterr().err)
    assert "downloading x.whl" in shown
    assert "3.0/6.0 MiB" in shown


def test_pulling_a_finished_model_imports_no_torch(tiny_gguf: Path) -> None:
    run(str(tiny_gguf))
    code = "import sys; from anaphora.cli.pull import pull; pull(sys.argv[1:], standalone_mode=False);"
    command = [sys.executable, "-c", f"{code} print('torch' in sys.modules)", str(tiny_gguf)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout
    assert answer.splitlines()[-1] == "False"
