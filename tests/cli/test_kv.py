"""`anaphora kv`: the printed sum, its JSON, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from anaphora.cli.main import cli
from anaphora.errors import AnaphoraError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["kv", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def as_json(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json"))
    assert found["schema_version"] == 1
    return found


def test_the_worked_example() -> None:
    text = run("Qwen/Qwen2.5-7B-Instruct", "--tokens", "8192")
    assert "2 x 28 layers x 4 KV heads x 128 x 2 bytes x 8,192 tokens = 469,762,048 bytes" in text
    assert "one token: 57,344 bytes (56 KiB)" in text
    assert "in all:    469,762,048 bytes (448 MiB)" in text
    assert "28 GiB" in run("Qwen/Qwen2.5-7B-Instruct", "--tokens", "32768", "--batch", "16")


def test_json() -> None:
    found = as_json("meta-llama/Meta-Llama-3-70B", "--tokens", "1")
    assert found["bytes_per_token"] == found["total_bytes"] == 327_680
    assert [term["layers"] for term in found["terms"]] == [80]
    assert found["warnings"] == []
    windows = as_json("google/gemma-3-27b-it", "--tokens", "32768")
    assert windows["total_bytes"] == sum(term["total_bytes"] for term in windows["terms"]) == 3_120_562_176
    assert (windows["bytes_per_token"], windows["bytes_per_token_at_this_length"]) == (507_904, 81_920)


def test_gguf_and_folder(tiny_gguf: Path, tmp_path: Path) -> None:
    assert as_json(str(tiny_gguf), "--tokens", "10")["total_bytes"] == 2 * 2 * 2 * 8 * 2 * 10
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "hidden_size": 32,
                "vocab_size": 9,
            }
        )
    )
    assert as_json(str(tmp_path), "--tokens", "10")["total_bytes"] == 2 * 2 * 4 * 8 * 2 * 10


def test_unknown_architectures_are_marked_on_every_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "thinkomat",
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "hidden_size": 32,
                "vocab_size": 9,
            }
        )
    )
    with pytest.raises(AnaphoraError, match="thinkomat"):
        run(str(path))
    lines = [
        line
        for line in run(str(path), "--assume-full-attention").splitlines()
        if "layers," in line or "bytes (" in line
    ]
    assert len(lines) == 3
    assert all(line.endswith("[assumed]") for line in lines)
    found = as_json(str(path), "--assume-full-attention")
    assert found["assumed_full_attention"] is True
    assert "assumed to be full attention" in found["warnings"][0]


def test_notes() -> None:
    assert "16,384 tokens are beyond the model's context of 8,192" in run("google/gemma-2-9b", "--tokens", "16384")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["Qwen/Qwen2.5-7B-Instructt"], 2, "nearest names: Qwen/Qwen2.5-7B-Instruct"),
        (["nowhere.json"], 2, "nowhere.json is not there"),
        (["nowhere.gguf"], 2, "nowhere.gguf is not there"),
        (["Qwen/Qwen2.5-7B-Instruct", "--kv-dtype", "fp3"], 2, "'fp3' is not known"),
        (["Qwen/Qwen2.5-7B-Instruct", "--tokens", "0"], 2, "0 is not in the range"),
        (["Qwen/Qwen2.5-7B-Instruct", "--tokens", "many"], 2, "'many' is not a valid integer"),
    ],
)
def test_bad_input_exits_2_with_what_to_do(arguments: list[str], code: int, says: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "anaphora", "kv", *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == code
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_it_runs_without_the_engines_packages() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from anaphora.cli.main import cli;"
        "CliRunner().invoke(cli, ['kv', 'Qwen/Qwen2.5-7B-Instruct'], catch_exceptions=False);"
        "print(sorted({'torch', 'transformers', 'numpy', 'gguf', 'httpx'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
