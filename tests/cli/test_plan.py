"""`anaphora plan` as users run it: exit codes, text, JSON, pictures, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from anaphora.cli.main import cli
from anaphora.errors import ConfigError, CorruptModel, ModelNotFound, UnsupportedModel

QWEN = ("plan", "Qwen/Qwen2.5-7B-Instruct", "--hardware", "rtx-4090", "--context", "32768", "--concurrency", "16")


@pytest.fixture(autouse=True)
def _own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANAPHORA_CONFIG_DIR", str(tmp_path))


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert result.stderr == ""
    return result.exit_code, result.stdout


def read(*args: str) -> tuple[int, dict[str, Any]]:
    code, text = run(*args, "--json")
    found: dict[str, Any] = json.loads(text)
    assert (found["schema_version"], found["command"]) == (1, "plan")
    return code, found


def test_it_does_not_fit() -> None:
    code, text = run(*QWEN, "--shared-prefix", "2000", "--grid")
    assert code == 1
    assert "Qwen/Qwen2.5-7B-Instruct on 1 x GeForce RTX 4090, vllm" in text
    assert "NO: 16 x 32,768 tokens take 28,345,368,576 bytes of KV" in text
    assert "4 of 16 fit" in text
    assert "a request of 32,768 tokens takes 1,879,048,192 bytes (1.75 GiB)" in text
    assert "the shared prefix of 2,000 tokens saves 1,720,320,000 bytes" in text
    assert "KV in fp8 and 4-bit (AWQ) weights" in text
    assert "the 1.2x rule" in text
    bar = next(line for line in text.splitlines() if line.startswith("["))
    assert bar.index("]") == 61
    assert bar.count("█") > bar.count("▒") > 0


def test_it_fits() -> None:
    code, found = read("plan", "qwen2.5:7b", "--hardware", "RTX 4090", "--context", "8192", "--concurrency", "2")
    assert code == 0
    assert found["fits"] is found["fits_surely"] is True
    assert found["kv"]["bytes_per_token"] == 57_344
    assert found["kv"]["request_bytes"] == 469_762_048
    assert found["ways_out"] == []
    assert found["longest_context"] == 32768
    inside = sum(part["bytes"] for part in found["memory"]["parts"] if part["inside"])
    assert inside + found["memory"]["available_for_kv"]["bytes"] == found["memory"]["allowed_bytes"]


def test_json_holds_what_the_text_says() -> None:
    code, found = read(*QWEN, "--grid")
    assert code == 1
    assert found["requests_that_fit"]["likely"] == found["most_requests"] == 4
    assert found["hardware"]["memory_measured"] is True
    assert found["grid"]["concurrencies"][-1] == 64
    assert len(found["grid"]["part_of_available"]) == len(found["grid"]["contexts"])
    assert {way["enough"] for way in found["ways_out"]} == {True, False}
    assert found["settings"]["share"] == 0.92


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp", "ollama", "transformers", "anaphora"])
def test_every_engine_answers(engine: str) -> None:
    code, found = read("plan", "Qwen/Qwen3-8B", "--hardware", "a100-80gb", "--context", "4096", "--engine", engine)
    assert code == 0
    assert found["engine"] == engine
    assert found["kv"]["request_bytes"] >= 4096 * 147_456


def test_pictures(tmp_path: Path) -> None:
    for name, start in (("grid.html", "<!doctype html>"), ("grid.svg", "<svg ")):
        run(*QWEN, "--html", str(tmp_path / name))
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)
    with pytest.raises(ConfigError, match="give a file in a folder that can be written"):
        CliRunner().invoke(cli, [*QWEN, "--html", str(tmp_path / "no" / "x.html")], catch_exceptions=False)


def test_a_config_of_ones_own(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    code, found = read("plan", str(path), "--hardware", "t4", "--context", "2048", "--engine", "vllm")
    assert code == 0
    assert found["kv"]["bytes_per_token"] == 2 * 4 * 2 * 64 * 2
    path.write_text(json.dumps(config)[:-20])
    with pytest.raises(CorruptModel, match=r"line 1,? column"):
        CliRunner().invoke(cli, ["plan", str(path), "--hardware", "t4"], catch_exceptions=False)
    path.write_text(json.dumps(config | {"model_type": "strange", "architectures": ["StrangeForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match="Strange"):
        CliRunner().invoke(cli, ["plan", str(path), "--hardware", "t4"], catch_exceptions=False)
    code, found = read("plan", str(path), "--hardware", "t4", "--context", "2048", "--assume-full-attention")
    assert found["assumed_full_attention"] is True
    _, text = run("plan", str(path), "--hardware", "t4", "--context", "2048", "--assume-full-attention")
    kv = [line for line in text.splitlines() if " tokens" in line and " KV" in line]
    assert kv
    assert all(line.endswith("[assumed]") for line in kv)
    assert any("sized as full attention" in remark for remark in found["remarks"])
    with pytest.raises(ModelNotFound, match="nearest names"):
        CliRunner().invoke(cli, ["plan", "qwen3-8c", "--hardware", "t4"], catch_exceptions=False)


def test_without_hardware_this_machine_is_planned_for() -> None:
    code, found = read("plan", "HuggingFaceTB/SmolLM2-135M-Instruct", "--context", "1024", "--engine", "anaphora")
    assert code == 0
    assert found["hardware"]["id"] == "this-machine"
    assert found["remarks"] == ["no --hardware: planned for this machine"]


def test_the_real_command_loads_nothing_heavy_and_exits_by_the_answer() -> None:
    code = (
        f"import sys; sys.argv = {['anaphora', *QWEN]!r}\n"
        "from anaphora.cli.main import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers', 'numpy', 'psutil'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "")
    wrong = [sys.executable, "-m", "anaphora", *QWEN, "--tp", "8"]
    refused = subprocess.run(wrong, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("anaphora: ")
    assert len(refused.stderr.splitlines()) == 1


def test_data_parallel_replicas_share_the_requests() -> None:
    base = ["plan", "Qwen/Qwen2.5-7B-Instruct", "--hardware", "rtx-4090", "--context", "32768"]
    four = CliRunner().invoke(cli, [*base, "--concurrency", "16", "--dp", "4", "--json"], catch_exceptions=False)
    one = CliRunner().invoke(cli, [*base, "--concurrency", "4", "--json"], catch_exceptions=False)
    assert (four.exit_code, one.exit_code) == (0, 0)
    planned, alone = json.loads(four.stdout), json.loads(one.stdout)
    assert "one of 4 replicas, with 4 of the 16 requests" in planned.pop("remarks")[0]
    alone.pop("remarks")
    assert planned == alone
    refused = CliRunner().invoke(cli, [*base, "--dp", "0"])
    assert "--dp is 0" in str(refused.exception)
