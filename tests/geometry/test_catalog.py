"""The catalogue of models: its facts against real configs and formulas, its look-up, and users' own files."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from anaphora.errors import ConfigError, CorruptModel, ModelNotFound
from anaphora.geometry import catalog
from anaphora.geometry.catalog import CatalogModel, expand, expand_runs, find_model, models, search_models
from anaphora.geometry.catalog_files import packaged_entries
from anaphora.geometry.model import ModelGeometry

FOLDER = Path(catalog.__file__).with_name("catalog")
REAL = Path(__file__).parents[2].parent / "shared" / "data" / "model_configs"
REAL_NAMES = sorted(path.parent.name for path in REAL.glob("*/config.json"))
CORRECTED: dict[str, dict[str, Any]] = {"facebook/opt-125m": {"architectures": ["OPTForCausalLM"]}}
"""The copy at hand was renamed for somebody's test; the catalogue has the model's own name."""
CANNOT_BE_SIZED: set[str] = set()
"""Entries the geometry refuses; empty it as architectures are learnt."""


@pytest.fixture(autouse=True)
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user's models.toml would lie; nobody's own file is read by the tests."""
    monkeypatch.setenv("ANAPHORA_CONFIG_DIR", str(tmp_path))
    return tmp_path / "models.toml"


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> tuple[CatalogModel, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANAPHORA_CONFIG_DIR", str(tmp_path_factory.mktemp("none")))
        return models()


def test_there_are_many_models_and_no_name_twice(every: tuple[CatalogModel, ...]) -> None:
    assert len(every) >= 300
    names = [name.casefold() for model in every for name in (model.id, *model.aliases)]
    assert sorted(names) == sorted(set(names))


def test_entries_read_one_by_one_are_the_whole_files() -> None:
    whole = [
        (table["id"], *table.get("aliases", ()))
        for path in sorted(FOLDER.glob("*.toml"))
        for table in tomllib.loads(path.read_text(encoding="utf-8"))["model"]
    ]
    entries = packaged_entries(FOLDER, "model")
    assert [entry.names for entry in entries] == whole
    assert [entry.table()["id"] for entry in entries] == [names[0] for names in whole]


def test_every_model_is_sized_and_plausible(every: tuple[CatalogModel, ...]) -> None:
    refused = set()
    for model in every:
        try:
            geometry = ModelGeometry.from_config(model.config)
        except CorruptModel:
            refused.add(model.id)
            continue
        assert 1 <= len(geometry.layers) <= 130, model.id
        assert 100 < geometry.vocab_size < 300_000, model.id
        assert geometry.max_position is None or 448 <= geometry.max_position <= 10_485_760, model.id
        per_token, state = geometry.bytes_per_token(2), geometry.state_bytes(2)
        assert 4_000 <= per_token <= 5_000_000 or (per_token == 0 and state > 0), model.id
        if model.parameters:  # one token's KV is small beside the weights
            assert per_token < model.parameters / 500, model.id
    assert refused == CANNOT_BE_SIZED


def test_every_model_has_its_source_dtype_and_count(every: tuple[CatalogModel, ...]) -> None:
    for model in every:
        assert "config" in model.source, model.id
        assert model.architecture != "unknown", model.id
        assert model.dtype in {"bfloat16", "float16", "float32", None}, model.id
        assert (model.parameters is None) == (model.parameters_from is None), model.id
        assert model.parameters is None or 5e7 < model.parameters < 3e12, model.id
    assert sum(model.parameters is not None for model in every) >= 280


QKV_BIAS = {"Qwen2ForCausalLM": True}
QK_NORM = {"Qwen3ForCausalLM": True}


def test_parameter_counts_are_what_the_shapes_give(every: tuple[CatalogModel, ...]) -> None:
    """Published and counted totals against the sum written out here, to the last parameter."""
    checked = 0
    for model in every:
        kind, c = model.architecture, model.config
        if kind not in {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}:
            continue
        hidden, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
        dim = c.get("head_dim") or hidden // heads
        layer = 2 * hidden * heads * dim + 2 * hidden * kv * dim + 3 * hidden * c["intermediate_size"] + 2 * hidden
        layer += (heads + 2 * kv) * dim if kind in QKV_BIAS else 0
        layer += 2 * dim if kind in QK_NORM else 0
        embeddings = c["vocab_size"] * hidden * (1 if c.get("tie_word_embeddings") else 2)
        assert model.parameters == embeddings + c["num_hidden_layers"] * layer + hidden, model.id
        checked += 1
    assert checked >= 90


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", 2 * 28 * 4 * 128 * 2),
        ("meta-llama/Meta-Llama-3-70B", 2 * 80 * 8 * 128 * 2),
        ("tiiuae/falcon-7b", 2 * 32 * 1 * 64 * 2),
        ("tiiuae/falcon-40b", 2 * 60 * 8 * 64 * 2),
        ("bigscience/bloom-7b1", 2 * 30 * 32 * 128 * 2),
        ("mosaicml/mpt-30b", 2 * 48 * 64 * 112 * 2),
        ("bigcode/starcoder", 2 * 40 * 1 * 128 * 2),
        ("databricks/dbrx-instruct", 2 * 40 * 8 * 128 * 2),
        ("THUDM/chatglm2-6b", 2 * 28 * 2 * 128 * 2),
        ("facebook/opt-66b", 2 * 64 * 72 * 128 * 2),
        ("deepseek-ai/DeepSeek-R1", 61 * (512 + 64) * 2),
        ("moonshotai/Kimi-K2-Instruct", 61 * (512 + 64) * 2),
        ("deepseek-ai/DeepSeek-V2-Lite", 27 * (512 + 64) * 2),
        ("google/gemma-3-12b-it", 2 * 48 * 8 * 256 * 2),
        ("ibm-granite/granite-4.0-h-small", 2 * 4 * 8 * 128 * 2),
        ("openai/gpt-oss-20b", 2 * 24 * 8 * 64 * 2),
    ],
)
def test_bytes_per_token_of_well_known_models(name: str, per_token: int) -> None:
    assert ModelGeometry.from_config(find_model(name).config).bytes_per_token(2) == per_token


@pytest.mark.skipif(not REAL_NAMES, reason="the real configurations (../shared/data/model_configs) are not here")
@pytest.mark.parametrize("folder", REAL_NAMES or ["none"])
def test_the_compact_facts_give_the_geometry_of_the_full_config(folder: str) -> None:
    name = folder.replace("__", "/")
    config = {**json.loads((REAL / folder / "config.json").read_text(encoding="utf-8")), **CORRECTED.get(name, {})}
    model = find_model(name)
    assert model.id == name
    if name in CANNOT_BE_SIZED:
        with pytest.raises(CorruptModel):
            ModelGeometry.from_config(model.config)
        return
    assert ModelGeometry.from_config(model.config) == ModelGeometry.from_config(config)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-7B-Instruct",
        "qwen/qwen2.5-7b-instruct",
        " Qwen2.5-7B-Instruct ",
        "qwen2.5:7b",
    ],
)
def test_find_by_id_alias_and_bare_name_in_any_case(name: str) -> None:
    assert find_model(name).id == "Qwen/Qwen2.5-7B-Instruct"


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ModelNotFound, match=r"'qwen2\.5-7b-instrct'; nearest names: Qwen/Qwen2\.5-7B-Instruct, "):
        find_model("qwen2.5-7b-instrct")
    with pytest.raises(ModelNotFound, match="`anaphora models` lists all"):
        find_model("!")


def test_a_bare_name_that_two_organisations_use_is_not_guessed(user_file: Path) -> None:
    user_file.write_text('[[model]]\nid = "me/phi-4"\n[model.config]\nhidden_size = 1\n', encoding="utf-8")
    assert find_model("microsoft/phi-4").id == "microsoft/phi-4"
    user_file.write_text('[[model]]\nid = "me/Mistral-7B-v0.1"\n[model.config]\nhidden_size = 1\n', encoding="utf-8")
    with pytest.raises(ModelNotFound, match=r"me/Mistral-7B-v0\.1, mistralai/Mistral-7B-v0\.1"):
        find_model("mistral-7b-v0.1")


def test_search_wants_every_word_in_any_name(every: tuple[CatalogModel, ...]) -> None:
    assert search_models("") == every
    found = search_models("qwen3 INSTRUCT-2507")
    assert {model.id for model in found} == {
        "Qwen/Qwen3-4B-Instruct-2507",
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "Qwen/Qwen3-235B-A22B-Instruct-2507",
    }
    assert search_models("nosuchmodel") == ()


def test_quantisation_and_dtype_come_from_the_config() -> None:
    assert find_model("gpt-oss-120b").quantization == "mxfp4"
    assert find_model("moonshotai/Kimi-K2.5").quantization == "compressed-tensors"
    assert find_model("Qwen/Qwen3-8B").quantization is None
    assert find_model("google/gemma-4-26B-A4B").dtype == "bfloat16"


def test_a_user_adds_models_and_replaces_ours(user_file: Path) -> None:
    ours = len(models())
    user_file.write_text(
        '# mine\n[[model]]\nid = "me/tiny"\naliases = ["tiny"]\n\n[model.config]\n'
        'architectures = ["LlamaForCausalLM"]\nmodel_type = "llama"\nhidden_size = 64\nnum_hidden_layers = 2\n'
        "num_attention_heads = 4\nnum_key_value_heads = 2\nvocab_size = 256\nintermediate_size = 96\n\n"
        '  [[ model ]]  # replaces the shipped one\nid = "Microsoft/PHI-4"\nconfig = { hidden_size = 8 }\n',
        encoding="utf-8",
    )
    tiny = find_model("TINY")
    assert ModelGeometry.from_config(tiny.config).bytes_per_token(2) == 2 * 2 * 2 * 16 * 2
    assert (tiny.family, tiny.parameters, tiny.source) == ("yours", None, str(user_file))
    assert find_model("microsoft/phi-4").config == {"hidden_size": 8}
    assert len(models()) == ours + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[model]]\nid = "a"\nb = = 1\n', r"models\.toml is not valid TOML: .*line 3"),
        ('\n[[model]]\naliases = ["x"]\n', r"models\.toml, line 2: the entry needs an id"),
        ("[[model]]\nid = 7\n", r"line 2: the entry needs an id"),
        ('[[model]]\nid = "a"\naliases = "b"\n', r"line 3: aliases is a list of names"),
        ('[[model]]\nid = "a"\n', r"line 1: a needs a table \[model\.config\]"),
        (
            '[[model]]\nid = "a"\nconfig = {x = 1}\nparameter = 5\n',
            r"line 4: no such key: parameter; did you mean para",
        ),
        ('[[model]]\nid = "a"\nconfig = {x = 1}\nparameters = "7B"\n', r"line 4: parameters is '7B'"),
        ('[[model]]\nid = "a"\nconfig = {x = 1}\nparameters = 0\n', r"line 4: parameters is a count above 0"),
        ('[[model]]\nid = "a"\nconfig = {x = 1}\nparameters_from = "hearsay"\n', r"line 4: parameters_from is one of"),
        ('[[model]]\nid = "a"\nconfig = {x = {runs = "2*(a"}}\n', r"line 1: runs = '2\*\(a' leaves a bracket open"),
        ('[[model]]\nid = "a"\nconfig = {x = 1}\n[models]\ny = 1\n', r"line 4: write each entry under a heading"),
        ('model = [{id = "a"}]\n', r"line 1: write each entry under a heading of its own, \[\[model\]\]"),
    ],
)
def test_a_broken_user_file_is_named_with_its_line(user_file: Path, text: str, message: str) -> None:
    user_file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        models()


def test_a_user_file_without_entries_changes_nothing(user_file: Path, every: tuple[CatalogModel, ...]) -> None:
    user_file.write_text("# nothing yet\n", encoding="utf-8")
    assert models() == every


def test_a_user_file_that_is_not_text(user_file: Path) -> None:
    user_file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot read .*models\.toml"):
        find_model("gpt2")


def test_shorthands_are_written_out() -> None:
    assert expand_runs("2*full 2*(a 2*b) -1 3") == ["full", "full", "a", "b", "b", "a", "b", "b", -1, 3]
    assert expand_runs("2*(x 2*(y))") == ["x", "y", "y", "x", "y", "y"]
    assert expand({"a": "null", "b": {"runs": "2*0"}, "c": ["l.<0-2,5>.w", "m"], "d": [[1, 2]]}) == {
        "a": None,
        "b": [0, 0],
        "c": ["l.0.w", "l.1.w", "l.2.w", "l.5.w", "m"],
        "d": [[1, 2]],
    }
    for broken, why in (("a)", "never opened"), ("(a)", "cannot be read"), ("2*(a", "leaves a bracket open")):
        with pytest.raises(ValueError, match=why):
            expand_runs(broken)
