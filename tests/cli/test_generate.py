"""`anaphora generate`: text, JSON, and the two ways of generating compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

from anaphora.cli.main import cli
from anaphora.engine.batch import Batch
from anaphora.engine.runner import ModelRunner
from anaphora.errors import ContextTooLong
from support.models import tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), max_position=2048)


def generate(folder: Path, *arguments: str) -> Result:
    common = ["--kv-memory", "16MiB", "--dtype", "float32"]
    return CliRunner().invoke(cli, ["generate", str(folder), *arguments, *common], catch_exceptions=False)


def test_text_and_json_agree(folder: Path) -> None:
    plain = generate(folder, "Hello", "--max-tokens", "20", "--ignore-eos")
    as_json = json.loads(generate(folder, "Hello", "--max-tokens", "20", "--ignore-eos", "--json").stdout)
    assert plain.exit_code == 0
    assert plain.stdout == as_json["text"] + "\n"
    assert as_json["finish_reason"] == "length"
    assert (as_json["prompt_tokens"], as_json["completion_tokens"]) == (5, 20)


def test_compare_cache_shows_the_counts_of_the_formula(folder: Path) -> None:
    result = generate(
        folder, "Once upon a time", "--prompt-tokens", "1000", "--max-tokens", "200", "--compare-cache", "--json"
    )
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["token_computations"] == {
        "no_cache": 220_100,
        "no_cache_first_prompt_pass": 1000,
        "with_cache": 1200,
    }
    assert report["same_tokens"] is True


def test_compare_cache_prints_a_table(folder: Path) -> None:
    result = generate(folder, "abc", "--max-tokens", "5", "--compare-cache")
    assert result.exit_code == 0
    assert "token computations" in result.stdout
    assert "same tokens" in result.stdout


def test_compare_cache_fails_when_the_tokens_differ(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is broken on purpose is found out."""

    honest = ModelRunner.execute

    def corrupting(runner: ModelRunner, batch: Batch) -> Tensor:
        if batch.rows[0].start:
            runner._storage.data.view(torch.float32).neg_()
        return honest(runner, batch)

    monkeypatch.setattr(ModelRunner, "execute", corrupting)
    result = CliRunner().invoke(
        cli,
        ["generate", str(folder), "Once upon a time", "--max-tokens", "30", "--compare-cache", "--kv-memory", "1MiB"],
    )
    assert result.exit_code == 1
    assert "the two runs differ from new token" in result.output


def test_a_prompt_beyond_the_context_says_both_numbers(folder: Path) -> None:
    result = CliRunner().invoke(cli, ["generate", str(folder), "a" * 3000, "--max-tokens", "5", "--kv-memory", "16MiB"])
    assert isinstance(result.exception, ContextTooLong)
    assert result.exception.exit_code == 2
    assert "3000" in str(result.exception)
    assert "2048" in str(result.exception)


@pytest.mark.parametrize("arguments", [["--temperature", "nan"], ["--temperature", "inf"], ["--top-p", "nan"]])
def test_what_is_no_number_is_a_usage_error(folder: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, ["generate", str(folder), "a", *arguments])
    assert result.exit_code == 2
    assert arguments[0] in result.output
