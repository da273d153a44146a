"""`anaphora quality`: table, JSON, page, recommendation, and what plan and serve read of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from anaphora.cli.main import cli
from anaphora.cli.quality_summary import Form, read_quality, recommend
from anaphora.errors import ConfigError
from anaphora.probes.statistics import Interval
from support.models import tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), head_dim=16)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANAPHORA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def quality(folder: Path, *arguments: str) -> Result:
    common = ["--kv-memory", "64MiB", "--dtype", "float32", "--greedy-tokens", "4"]
    return CliRunner().invoke(cli, ["quality", str(folder), *arguments, *common])


def test_json_page_and_file(folder: Path, tmp_path: Path) -> None:
    page, file = tmp_path / "report.html", tmp_path / "quality.json"
    options = ["--kv-dtypes", "int8,int4", "--context", "160", "--by-layer", "int4"]
    result = quality(folder, *options, "--json", "--html", str(page), "--output", str(file))
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads(file.read_text())
    assert (report["schema_version"], report["command"], report["reference"]) == (1, "quality", "bf16")
    bf16, int8, int4 = report["forms"]
    assert bf16["mean_kl"]["estimate"] == 0
    assert int8["mean_kl"]["low"] <= int8["mean_kl"]["estimate"] <= int8["mean_kl"]["high"]
    assert int8["mean_kl"]["estimate"] < int4["mean_kl"]["estimate"] <= int4["p99_kl"]
    assert int8["bytes_per_token"] == 2 * 2 * 2 * (16 + 2)  # layers, KV heads, keys and values; scales included
    assert int8["tokens_per_gib"] == 2**30 // int8["bytes_per_token"]
    assert set(int8["kl_by_kind"]) <= {"english", "code", "chinese"}
    assert len(report["kl_by_layer_skipped"]["int4"]["layers"]) == 2
    html = page.read_text()
    assert html.count("<svg") == 2
    assert "int4" in html
    assert "Recommended" in html
    measured = read_quality(file)
    assert measured.measured["int8"].startswith("mean KL ")
    plan = CliRunner().invoke(
        cli, ["plan", "smollm2-135m", "--engine", "anaphora", "--context", "2048", "--quality", str(file), "--json"]
    )
    assert json.loads(plan.stdout)["measured"]["kv_types"] == measured.measured


def test_a_table_and_an_unmet_limit(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text * 4}) for text in ("one and two ", "left and right ")))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    result = quality(folder, "--kv-dtypes", "int4", "--context", "80", "--prompts", str(prompts), "--max-kl", "1e-9")
    assert result.exit_code == 1, result.output
    assert "Recommended: bf16. No smaller form is within the limit (int4: has a mean KL of" in result.stdout
    assert "bytes/token" in result.stdout
    assert "2 texts" in result.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--kv-dtypes", "int9"], "did you mean int"),
        (["--kv-dtypes", "bf16"], "nothing to compare"),
        (["--context", "100000"], "beyond this model's context of 512"),
        (["--kv-dtypes", "int8", "--by-layer", "int4", "--context", "64"], "choose one of int8"),
        (["--kv-dtypes", "int8", "--prompts", "/nowhere", "--context", "64"], "--prompts /nowhere"),
        (["--k-dtype", "int7"], "--k-dtype 'int7' is not known"),
        (["--kv-dtypes", "int8", "--kv-cache-dtype-skip-layers", "7"], "this model has 0 to 1"),
    ],
)
def test_bad_questions_say_what_to_do(folder: Path, options: list[str], says: str) -> None:
    result = quality(folder, *options)
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigError), result.output
    assert says in str(result.exception)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"command": "quality", "schema_version": 99}', '{"command": "plan"}']
)
def test_what_is_no_quality_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="write it again"):
        read_quality(file)
    with pytest.raises(ConfigError, match="can be read"):
        read_quality(tmp_path / "missing.json")


def form(name: str, size: int, kl: float, high: float, answered: tuple[bool, ...] = (True, True)) -> Form:
    interval = Interval(kl, kl / 2, high, 0.95)
    seen = list(answered)
    return Form(
        name, name, name, size, 2**30 // size, 1000 / size, interval, 10 * kl, interval, 9.0, {}, [], [], seen, 1, 10, 8
    )  # fmt: skip


def test_the_smallest_form_that_surely_holds_is_recommended() -> None:
    bf16, int8 = form("bf16", 1000, 0, 0), form("int8", 531, 0.0002, 0.0003)
    k8v4, int4 = form("k8v4", 422, 0.004, 0.006), form("int4", 305, 0.012, 0.015)
    every = [bf16, int8, k8v4, int4]
    assert recommend(every, 0.02).name == "int4"
    assert recommend(every, 0.01).name == "k8v4"
    assert "int4 has a mean KL of 0.012" in recommend(every, 0.01).why
    assert recommend(every, 0.005).name == "int8"  # k8v4 is within it, but not surely
    assert recommend(every, 0.0001).name == "bf16"
    assert not recommend(every, 0.0001).met
    forgetful = replace(k8v4, answered=[True, False])
    assert recommend([bf16, int8, forgetful], 0.01).name == "int8"
    assert "misses 1 of the answers" in recommend([bf16, int8, forgetful], 0.01).why
