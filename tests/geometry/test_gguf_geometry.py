"""Geometry from GGUF headers written by the `gguf` package, whole and split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from anaphora.errors import CorruptModel, ModelNotFound, UnsupportedModel
from anaphora.geometry.find import find_geometry
from anaphora.geometry.gguf_header import GGML_TYPES
from anaphora.geometry.model import Keeps, LayerKV, ModelGeometry


def write(path: Path, arch: str, tensors: dict[str, int], **values: Any) -> Path:
    """A GGUF file with these tensors (weights each, float16) and keys; lists become arrays."""
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in {
        "block_count": 2,
        "embedding_length": 64,
        "context_length": 4096,
        "vocab_size": 10,
        **values,
    }.items():
        name = f"{arch}.{key.replace('__', '.')}"
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    for tensor, size in tensors.items():
        writer.add_tensor(tensor, np.zeros(size, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def heads(count: int = 8, kv: int | list[int] = 2) -> dict[str, Any]:
    return {"attention__head_count": count, "attention__head_count_kv": kv}


TENSORS = {
    "token_embd.weight": 640,
    "blk.0.attn_q.weight": 100,
    "blk.0.ffn_up.weight": 50,
    "blk.0.ffn_up_exps.weight": 400,
    "output_norm.weight": 64,
}


def test_tiny_llama(tiny_gguf: Path) -> None:
    geometry = ModelGeometry.from_gguf(tiny_gguf)
    assert geometry.layers == (LayerKV(2, 8, 8),) * 2
    assert (geometry.query_heads, geometry.hidden_size, geometry.vocab_size, geometry.max_position) == (4, 32, 260, 128)
    assert geometry.parameters is not None
    assert geometry.parameters.total * 4 == geometry.stored_weight_bytes == geometry.weight_bytes()
    assert find_geometry(str(tiny_gguf)) == geometry


def test_weights_by_place(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", TENSORS, **heads(), expert_count=4, expert_used_count=1)
    geometry = ModelGeometry.from_gguf(path)
    found = geometry.parameters
    assert found is not None
    assert (found.embedding, found.attention, found.dense, found.experts, found.other) == (640, 100, 50, 400, 64)
    assert found.active_experts == 100
    assert geometry.stored_weight_bytes == 2 * found.total
    assert geometry.quantization is not None
    assert geometry.quantization.name == "F16"


@pytest.mark.parametrize(
    ("arch", "values", "expected"),
    [
        ("llama", heads(), [LayerKV(2, 8, 8)] * 2),
        ("llama", heads(kv=[2, 4]), [LayerKV(2, 8, 8), LayerKV(4, 8, 8)]),
        ("llama", {**heads(), "attention__key_length": 16, "attention__value_length": 12}, [LayerKV(2, 16, 12)] * 2),
        ("llama", {**heads(), "attention__sliding_window": 8}, [LayerKV(2, 8, 8)] * 2),  # llama.cpp keeps all tokens
        (
            "gemma2",
            {**heads(), "attention__sliding_window": 8},
            [LayerKV(2, 8, 8, 8, Keeps.SLIDING), LayerKV(2, 8, 8)],
        ),
        (
            "gemma3",
            {**heads(), "attention__sliding_window": 8, "attention__sliding_window_pattern": [True, False]},
            [LayerKV(2, 8, 8, 8, Keeps.SLIDING), LayerKV(2, 8, 8)],
        ),
        (
            "gemma3n",
            {**heads(), "attention__shared_kv_layers": 1},
            [LayerKV(2, 8, 8), LayerKV(0, 0, 0, keeps=Keeps.SHARED, source=0)],
        ),
        (
            "deepseek2",
            {**heads(), "attention__kv_lora_rank": 512, "rope__dimension_count": 64},
            [LayerKV(1, 576, 0, keeps=Keeps.LATENT)] * 2,
        ),
    ],
)
def test_layers(tmp_path: Path, arch: str, values: dict[str, Any], expected: list[LayerKV]) -> None:
    geometry = ModelGeometry.from_gguf(write(tmp_path / "m.gguf", arch, TENSORS, **values))
    assert list(geometry.layers) == expected


def test_hybrids(tmp_path: Path) -> None:
    ssm = {"ssm__inner_size": 128, "ssm__state_size": 16, "ssm__conv_kernel": 4, "ssm__time_step_rank": 4}
    jamba = ModelGeometry.from_gguf(write(tmp_path / "j.gguf", "jamba", TENSORS, **heads(kv=[0, 2]), **ssm))
    assert [layer.keeps for layer in jamba.layers] == [Keeps.STATE, Keeps.FULL]
    assert jamba.layers[0].state is not None
    assert jamba.layers[0].state.shapes() == ((3, 128), (128, 1, 16))
    mamba = ModelGeometry.from_gguf(write(tmp_path / "m.gguf", "mamba", TENSORS, **ssm, **heads(0, 0)))
    assert all(layer.state and not layer.kv_heads for layer in mamba.layers)
    next80 = ModelGeometry.from_gguf(write(tmp_path / "q.gguf", "qwen3next", TENSORS, block_count=4, **heads(), **ssm))
    assert [layer.keeps is Keeps.STATE for layer in next80.layers] == [True, True, True, False]


def split(path: Path, parts: int, **values: Any) -> list[Path]:
    """A split model: the keys in the first part, one tensor in each."""
    files = []
    for i in range(parts):
        file = path / f"model-{i + 1:05d}-of-{parts:05d}.gguf"
        writer = gguf.GGUFWriter(str(file), "llama")
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", parts)
        for key, value in ({"block_count": 2, "embedding_length": 64, **heads(), **values} if i == 0 else {}).items():
            writer.add_uint32(f"llama.{key.replace('__', '.')}", value)
        writer.add_tensor(f"blk.{i}.attn_q.weight", np.zeros(100, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files.append(file)
    return files


def test_split_files_are_added_up_from_any_part(tmp_path: Path) -> None:
    files = split(tmp_path, 3)
    for file in files:
        geometry = ModelGeometry.from_gguf(file)
        assert geometry.stored_weight_bytes == 3 * 400
        assert len(geometry.layers) == 2
    files[1].unlink()
    with pytest.raises(ModelNotFound, match=r"one of 3 parts; missing: model-00002-of-00003\.gguf"):
        ModelGeometry.from_gguf(files[0])


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"none\.gguf is not there"):
        ModelGeometry.from_gguf(tmp_path / "none.gguf")
    with pytest.raises(CorruptModel, match=r"llama\.embedding_length is 0"):
        ModelGeometry.from_gguf(write(tmp_path / "m.gguf", "llama", TENSORS, **heads(), embedding_length=0))
    with pytest.raises(UnsupportedModel, match=r"architecture 'bert-ish'.*neither attention heads nor a state"):
        ModelGeometry.from_gguf(write(tmp_path / "b.gguf", "bert-ish", TENSORS))
    with pytest.raises(CorruptModel, match="names 1 layers, the model has 2"):
        ModelGeometry.from_gguf(write(tmp_path / "s.gguf", "llama", TENSORS, **heads(kv=[2])))


def test_the_table_of_types_is_ggmls() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.constants.GGML_QUANT_SIZES.items()}
    assert theirs == GGML_TYPES
