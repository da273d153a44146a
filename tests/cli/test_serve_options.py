"""`anaphora serve`: options, config files and what is refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from anaphora.cli.main import cli
from anaphora.errors import AnaphoraError
from support.models import tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def resolved(*arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(cli, ["serve", *arguments, "--print-config"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    config: dict[str, object] = json.loads(result.stdout)
    return config


def refused(*arguments: str) -> str:
    """The message of the error of ours that the command ends with."""
    result = CliRunner().invoke(cli, ["serve", *arguments, "--print-config"])
    assert isinstance(result.exception, AnaphoraError), result.output
    assert result.exception.exit_code == 2
    return str(result.exception)


def test_print_config_leaves_nothing_open(folder: Path) -> None:
    config = resolved(str(folder), "--kv-memory", "1MiB")
    assert config.pop("seed") is None  # the one setting whose None means something: each request draws its own
    assert None not in config.values()
    assert "auto" not in (config["dtype"], config["device"])
    assert config["max_model_len"] == 512
    assert config["eviction_policy"] == "hazard"
    assert config["num_blocks"] == (1 << 20) // (2 * 2 * (8 + 8) * 16 * 4)


def test_a_vllm_config_file_gives_defaults_and_the_command_line_wins(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"model: {folder}\ndtype: float32\nmax-model-len: 256\nmax_num_seqs: 4\nblock-size: 32\n"
        "enable_prefix_caching: false\nkv-memory: 2MiB\nserved-model-name: [one, two]\nchat-template: null\n"
    )
    config = resolved("--config", str(path), "--max-num-seqs", "8")
    assert config["max_model_len"] == 256
    assert config["max_num_seqs"] == 8
    assert config["block_size"] == 32
    assert config["enable_prefix_caching"] is False
    assert config["model_path"] == str(folder)


def test_the_eviction_policy_is_chosen_by_name(folder: Path) -> None:
    assert resolved(str(folder), "--eviction-policy", "s3-fifo")["eviction_policy"] == "s3-fifo"
    assert "must be one of lru, lfu" in refused(str(folder), "--eviction-policy", "random")


def test_every_problem_of_a_config_file_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("max-modell-len: 8192\nswap_space: 8\nnum_gpu_blocks_override: null\ngpu_memory_utilization: 0.9\n")
    message = refused("x", "--config", str(path))
    assert "did you mean max-model-len?" in message
    assert "swap_space: vLLM removed it in 0.18" in message
    assert message.count("kv-memory: 4GiB") == 2


@pytest.mark.parametrize(
    ("text", "says"), [("a: [1", "not valid YAML"), ("- a\n- b\n", "keys and values"), (None, "cannot read")]
)
def test_a_broken_config_file_is_refused(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    assert says in refused("x", "--config", str(path))


def test_values_of_the_wrong_form_in_a_config_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("port: [1]\nmax_model_len: {a: 1}\napi-key: {a: 1}\nserved-model-name: [a, b]\n")
    message = refused("x", "--config", str(path))
    assert "port: give one value" in message
    assert "max_model_len: give one value, as max-model-len: VALUE" in message
    assert "api-key: give one value" in message
    assert "served-model-name" not in message


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_a_limit_that_is_no_time_is_a_usage_error(folder: Path, seconds: str) -> None:
    result = CliRunner().invoke(cli, ["serve", str(folder), "--shutdown-timeout", seconds, "--print-config"])
    assert result.exit_code == 2
    assert "--shutdown-timeout" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dtype", "int3"], "it must be one of auto"),
        (["--device", "tpu"], "it must be auto, cpu or cuda"),
        (["--block-size", "24"], "a power of two from 1 to 256"),
        (["--max-model-len", "100000"], "context of 512 tokens"),
        (["--max-model-len", "0"], "it must be 1 or more"),
        (["--kv-memory", "1KiB", "--max-model-len", "512"], "Raise --kv-memory"),
        (["--kv-memory", "900TiB"], "does not fit"),
        (["--max-num-batched-tokens", "4"], "is below --max-num-seqs"),
        (["--implementation", "magic"], "auto, compact or transformers"),
        (["--chat-template", "/nowhere.jinja"], "give a readable Jinja file"),
        (["--api-key-file", "/nowhere.keys"], "one key per line"),
    ],
)
def test_impossible_settings_say_what_would_work(folder: Path, arguments: list[str], says: str) -> None:
    assert says in refused(str(folder), *arguments)


def test_a_size_that_is_none_is_a_usage_error(folder: Path) -> None:
    result = CliRunner().invoke(cli, ["serve", str(folder), "--kv-memory", "much"])
    assert result.exit_code == 2
    assert "4GiB" in result.output


def test_an_unknown_model_names_what_would_be_accepted() -> None:
    message = refused("smollm2-135")
    assert "smollm2-135m" in message
    assert "hub id" in message
