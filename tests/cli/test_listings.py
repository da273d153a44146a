"""`anaphora models` and `anaphora hardware`: tables, JSON, searches and misses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from anaphora.cli.main import cli
from anaphora.errors import HardwareNotFound, ModelNotFound


@pytest.fixture(autouse=True)
def _own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANAPHORA_CONFIG_DIR", str(tmp_path))


def run(*args: str) -> str:
    result = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stderr == ""
    return result.stdout


def read(*args: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(*args, "--json"))
    assert answer["schema_version"] == 1
    return answer


def test_models_as_json_hold_the_facts_and_the_size() -> None:
    assert len(read("models")["models"]) >= 300
    (model,) = read("models", "Qwen2.5-Coder", "7b")["models"]
    assert model["id"] == "Qwen/Qwen2.5-Coder-7B-Instruct"
    assert model["parameters"] == 7_615_616_512
    assert model["kv_bytes_per_token"] == 57_344
    assert (model["layers"], model["max_position"], model["state_bytes"]) == (28, 32_768, 0)
    assert (model["dtype"], model["quantization"]) == ("bfloat16", None)


def test_models_as_a_table() -> None:
    table = run("models", "kimi-k2")
    (row,) = (line for line in table.splitlines() if "moonshotai/Kimi-K2-Instruct " in line)
    assert row.split()[:5] == ["moonshotai/Kimi-K2-Instruct", "1026.41B", "fp8", "+", "bfloat16"]
    assert "70,272" in row
    assert table.rstrip().endswith("models")


def test_hardware_as_json() -> None:
    assert len(read("hardware")["devices"]) >= 150
    (device,) = read("hardware", "4090", "laptop")["devices"]
    assert device["id"] == "rtx-4090-laptop"
    assert device["memory_measured"] is False
    assert device["bandwidth_bytes_per_second"] == 576e9
    assert device["flops"]["bf16"] == 79.4e12


def test_hardware_as_a_table_marks_what_is_derived() -> None:
    rows = run("hardware", "rtx-40").splitlines()
    assert any("rtx-4090 " in row and " 23.65 GiB" in row for row in rows)
    assert any("rtx-4080 " in row and "~15.60 GiB" in row for row in rows)
    assert any("48/64/128 GB" in row for row in run("hardware", "m3-max").splitlines())


def test_a_name_that_is_no_search_term_is_still_found() -> None:
    assert read("hardware", "NVIDIA A100-SXM4-80GB")["devices"][0]["id"] == "a100-80gb"


def test_a_miss_names_the_nearest() -> None:
    with pytest.raises(ModelNotFound, match=r"nearest names: .*Qwen/Qwen3-8B"):
        CliRunner().invoke(cli, ["models", "qwen3-8c"], catch_exceptions=False)
    with pytest.raises(HardwareNotFound, match=r"nearest names: .*rtx-4090"):
        CliRunner().invoke(cli, ["hardware", "rtx-4099"], catch_exceptions=False)


@pytest.mark.parametrize("command", ["models", "hardware"])
def test_the_real_command_exits_2_with_one_line_and_loads_nothing_heavy(command: str) -> None:
    code = (
        f"import sys; sys.argv = ['anaphora', {command!r}, 'no such thing'];"
        "from anaphora.cli.main import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("anaphora: the catalogue has no")
    assert len(result.stderr.splitlines()) == 1
