"""GGUF files: what is read, what is refused, and what the conversion keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.engine.sources.cache import quiet
from anaphora.engine.sources.gguf_convert import convert_gguf
from anaphora.engine.sources.gguf_rope import rope_scaling
from anaphora.errors import CorruptModel, UnsupportedModel
from anaphora.geometry.gguf_header import read_gguf_header


@pytest.fixture(scope="module")
def converted(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("converted")
    (work / "model").mkdir()
    convert_gguf(tiny_gguf, work, work / "model", quiet)
    return work / "model"


def test_header(tiny_gguf: Path) -> None:
    header = read_gguf_header(tiny_gguf)
    assert header.architecture == "llama"
    assert header.metadata["llama.attention.head_count"] == 4
    assert header.metadata["tokenizer.ggml.tokens"][256:] == ["he", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len(header.tensor_names) == 2 + 2 * 9
    assert header.elements == 260 * 32 + 32 + 2 * (2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32)


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (b"", CorruptModel, "not a GGUF file"),
        (b"PK\x03\x04 and so on", CorruptModel, "not a GGUF file"),
        (b"GGUF", CorruptModel, "ends inside its header"),
        (b"GGUF\x01\0\0\0" + bytes(16), UnsupportedModel, "GGUF version 1"),
        (b"GGUF\x03\0\0\0" + bytes(16), CorruptModel, "no architecture"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, CorruptModel, "ends inside its header"),
    ],
)
def test_garbage_is_refused_by_name(tmp_path: Path, content: bytes, error: type[Exception], says: str) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(error, match=says) as caught:
        read_gguf_header(file)
    assert str(file) in str(caught.value)


def test_cut_short_anywhere_is_noticed(tiny_gguf: Path, tmp_path: Path) -> None:
    whole = tiny_gguf.read_bytes()
    file = tmp_path / "cut.gguf"
    for length in [*range(0, len(whole), 997), len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(CorruptModel, match=r"cut\.gguf"):
            read_gguf_header(file)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_flipped_byte_in_the_header_never_escapes_as_another_error(tiny_gguf: Path, data: st.DataObject) -> None:
    content = bytearray(tiny_gguf.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 9000))] = data.draw(st.integers(0, 255))
    file = tiny_gguf.with_name("flipped.gguf")
    file.write_bytes(content)
    try:
        read_gguf_header(file)
    except (CorruptModel, UnsupportedModel) as error:
        assert str(file) in str(error)  # noqa: PT017


def test_a_part_of_a_split_model_says_how_to_join(tmp_path: Path) -> None:
    import gguf

    file = tmp_path / "m-00001-of-00003.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("t", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"one of 3 parts.*llama-gguf-split --merge"):
        read_gguf_header(file)


def test_conversion_keeps_weights_tokens_and_template(tiny_gguf: Path, converted: Path) -> None:
    import gguf
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    weights = load_file(converted / "model.safetensors")
    stored = {tensor.name: torch.tensor(tensor.data) for tensor in gguf.GGUFReader(str(tiny_gguf)).tensors}
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ):
        assert torch.equal(weights[ours], stored[theirs].to(torch.bfloat16)), ours
    tokenizer = AutoTokenizer.from_pretrained(str(converted))
    tokens = read_gguf_header(tiny_gguf).metadata["tokenizer.ggml.tokens"]
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    assert tokenizer("he<|im_end|>").input_ids == [256, 259]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=True)["input_ids"] == [
        258,
        256,
        259,
    ]


def test_conversion_ends_at_the_eos_and_at_the_end_of_a_turn(converted: Path) -> None:
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == [257, 259]


def test_conversion_splits_digits_as_the_vocabulary_was_learned(converted: Path) -> None:
    splitter = json.loads((converted / "tokenizer.json").read_text())["pre_tokenizer"]
    assert [part["type"] for part in splitter["pretokenizers"]] == ["Digits", "ByteLevel"]


def test_transformers_is_left_as_it_was(converted: Path) -> None:
    import gguf
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    assert converted.is_dir()
    assert isinstance(gguf.GGUFReader, type)
    assert isinstance(modeling_gguf_pytorch_utils.tqdm, type)
    assert logging.is_progress_bar_enabled()


def write_gguf(file: Path, architecture: str, tensors: dict[str, np.ndarray], **metadata: object) -> Path:
    import gguf

    writer = gguf.GGUFWriter(str(file), architecture)
    for key, value in metadata.items():
        name = f"{architecture}.rope.{key.replace('__', '.')}"
        writer.add_string(name, value) if isinstance(value, str) else writer.add_float32(name, float(str(value)))
    for name, tensor in {"t": np.zeros(4, np.float32), **tensors}.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_what_transformers_cannot_convert_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "odd.gguf", "no-such-arch", {})
    (tmp_path / "model").mkdir()
    with pytest.raises(UnsupportedModel, match=r"odd\.gguf \(architecture 'no-such-arch'\).*safetensors folder"):
        convert_gguf(file, tmp_path, tmp_path / "model", quiet)


def test_scaled_rope_of_llama_3(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=64, rope_parameters=expected | {"rope_theta": 500000.0})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** -(np.arange(32) / 32)
    factors = (plain / scaled.numpy()).astype(np.float32)
    file = write_gguf(tmp_path / "l3.gguf", "llama", {"rope_freqs.weight": factors}, freq_base=500000.0)
    assert rope_scaling(file, read_gguf_header(file)) == expected
    file = write_gguf(tmp_path / "x.gguf", "llama", {"rope_freqs.weight": factors[::-1].copy()}, freq_base=500000.0)
    with pytest.raises(UnsupportedModel, match="no known rule"):
        rope_scaling(file, read_gguf_header(file))


@pytest.mark.parametrize(
    ("architecture", "metadata", "expected"),
    [
        ("llama", {}, None),
        ("qwen2", {"scaling__type": "none"}, None),
        ("llama", {"scaling__type": "linear", "scaling__factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            "qwen2",
            {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 32768},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
    ],
)
def test_rope_scaling_of_the_metadata(tmp_path: Path, architecture: str, metadata: dict[str, object], expected) -> None:  # type: ignore[no-untyped-def]
    file = write_gguf(tmp_path / "r.gguf", architecture, {}, **metadata)
    assert rope_scaling(file, read_gguf_header(file)) == expected


def test_rope_scaling_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "p.gguf", "phi3", {"rope_factors_long.weight": np.ones(4, np.float32)})
    with pytest.raises(UnsupportedModel, match="scaling"):
        rope_scaling(file, read_gguf_header(file))


def test_a_disk_that_fills_up_while_converting(tiny_gguf: Path, tmp_path: Path) -> None:
    code = f"""
import resource
from anaphora.engine.sources.resolve import resolve_model
from anaphora.errors import DownloadError
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    resolve_model({str(tiny_gguf)!r})
except DownloadError as error:
    print(error)
"""
    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", "ANAPHORA_CACHE": str(tmp_path)},
    )
    assert child.stdout.startswith(f"No room to write under {tmp_path}"), child.stdout + child.stderr
    assert not list((tmp_path / "work").iterdir())
    assert not (tmp_path / "models").exists()
