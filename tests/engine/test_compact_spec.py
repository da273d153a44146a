from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from anaphora.engine.models.compact import CompactDecoder
from anaphora.engine.models.load import LoadedModel, load_model
from anaphora.engine.models.spec import decoder_spec
from anaphora.errors import CorruptModel, UnsupportedModel
from anaphora.geometry.model import ModelGeometry

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def spec_of(**changes: Any) -> Any:
    config = CONFIG | changes
    return decoder_spec(config, ModelGeometry.from_config(config))


def folder_of(tmp_path: Path, config: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (10, 8),
        "lm_head.weight": (10, 8),
        "model.norm.weight": (8,),
        f"{layer}input_layernorm.weight": (8,),
        f"{layer}post_attention_layernorm.weight": (8,),
        f"{layer}self_attn.q_proj.weight": (8, 8),
        f"{layer}self_attn.k_proj.weight": (4, 8),
        f"{layer}self_attn.v_proj.weight": (4, 8),
        f"{layer}self_attn.o_proj.weight": (8, 8),
        f"{layer}mlp.gate_proj.weight": (12, 8),
        f"{layer}mlp.up_proj.weight": (12, 8),
        f"{layer}mlp.down_proj.weight": (8, 12),
    }
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def load(folder: Path, config: dict[str, Any], **options: Any) -> LoadedModel:
    chosen: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "implementation": "auto"} | options
    return load_model(folder, config, ModelGeometry.from_config(config), **chosen)


def test_what_no_spec_expresses_has_none() -> None:
    assert spec_of() is not None
    assert spec_of(model_type="stablelm") is None
    assert spec_of(hidden_act="quick_gelu") is None
    assert spec_of(rope_scaling={"rope_type": "proportional", "factor": 2.0}) is None


def test_older_and_newer_rope_keys_mean_the_same() -> None:
    old = spec_of(rope_theta=700.0, rope_scaling={"type": "linear", "factor": 2.0})
    new = spec_of(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0})
    assert old == new != spec_of()


def test_config_that_lacks_something_is_named() -> None:
    with pytest.raises(CorruptModel, match="lacks factor"):
        spec_of(rope_scaling={"rope_type": "linear"})
    config = {name: value for name, value in CONFIG.items() if name != "intermediate_size"}
    with pytest.raises(CorruptModel, match="lacks intermediate_size"):
        decoder_spec(config, ModelGeometry.from_config(config))


@pytest.mark.parametrize(
    "changes",
    [{"rms_norm_eps": "a"}, {"rms_norm_eps": None}, {"intermediate_size": None}, {"max_position_embeddings": "x"},
     {"rope_theta": "x"}],
)  # fmt: skip
def test_a_value_of_the_wrong_form_is_refused(changes: dict[str, Any]) -> None:
    geometry = ModelGeometry.from_config(CONFIG)
    with pytest.raises(CorruptModel, match=r"config\.json of LlamaForCausalLM holds a value of the wrong form"):
        decoder_spec(CONFIG | changes, geometry)


def test_embedding_models_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="attend to later ones"):
        spec_of(model_type="gemma3_text", use_bidirectional_attention=True)


def test_asking_for_the_compact_decoder_of_an_unknown_family(tmp_path: Path) -> None:
    config = CONFIG | {"model_type": "stablelm", "architectures": ["StableLmForCausalLM"]}
    with pytest.raises(UnsupportedModel, match=r"StableLmForCausalLM.*--implementation at auto"):
        load(folder_of(tmp_path, config), config, implementation="compact")


def test_loaded_decoder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, CONFIG)
    loaded = load(folder, CONFIG, dtype=torch.bfloat16)
    assert loaded.implementation == "compact"
    assert isinstance(loaded.decoder, CompactDecoder)
    assert loaded.decoder.dtype == torch.bfloat16
    assert loaded.decoder.device == torch.device("cpu")
    assert loaded.decoder.weight_bytes == 2 * (2 * 80 + 3 * 8 + (8 + 4 + 4 + 8) * 8 + 3 * 12 * 8)
    tied = load(folder, CONFIG | {"tie_word_embeddings": True}, dtype=torch.bfloat16)
    assert tied.decoder.weight_bytes == loaded.decoder.weight_bytes - 2 * 80


def test_digest_tells_apart_whatever_makes_other_keys_and_values(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, CONFIG)
    digest = load(folder, CONFIG).weights_digest
    assert load(folder, CONFIG).weights_digest == digest
    assert load(folder, CONFIG, max_model_len=16).weights_digest == digest
    assert load(folder, CONFIG, dtype=torch.bfloat16).weights_digest != digest
    assert load(folder, CONFIG | {"rope_theta": 5e4}).weights_digest != digest


def test_transformers_is_not_imported(tmp_path: Path) -> None:
    folder_of(tmp_path, CONFIG)
    code = (
        "import json, pathlib, sys, torch\n"
        "from anaphora.geometry.model import ModelGeometry\n"
        "from anaphora.engine.models.load import load_model\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "config = json.loads((folder / 'config.json').read_text())\n"
        "load_model(folder, config, ModelGeometry.from_config(config), dtype=torch.float32,\n"
        "             device=torch.device('cpu'), implementation='auto')\n"
        "import anaphora.engine.runner\n"
        "sys.exit('transformers' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
