"""Config.json with wrong values: named, or refused where our engine cannot hold it; never another error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.errors import CorruptModel, InputError, ModelNotFound, UnsupportedModel
from anaphora.geometry.fields import parse_config
from anaphora.geometry.layout import CacheLayout
from anaphora.geometry.model import ModelGeometry
from support.configs import LLAMA
from support.configs import geometry_of as of


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": None}, "lacks num_hidden_layers / n_layer"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers is 'four'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"model_type": "jamba", "attn_layer_period": [1]}, "attn_layer_period is .* must be a positive"),
        ({"model_type": "nemotron_h", "layers_block_type": ["mamba", "mlp", "attention", 3]}, "layer type 3"),
        ({"model_type": "bamba", "attn_layer_indices": ["one"]}, "a type that its key cannot have"),
        ({"num_key_value_heads": 3}, "8 query heads are not divisible by 3 KV heads"),
        ({"hidden_size": 63}, "63 is not divisible by 8 heads; set head_dim"),
        ({"sliding_window": "wide"}, "sliding_window is 'wide'"),
        ({"sliding_window": [16, 32]}, r"several sizes \[16, 32\]"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, the model has 4"),
        ({"layer_types": ["astral_attention"] * 4}, "layer type 'astral_attention' is not one of"),
        ({"layer_types": "full"}, "layer_types is 'full'; it must be a list"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX*-"}, "must hold one of"),
        ({"model_type": "kimi_linear", "kv_lora_rank": 8}, "lacks linear_attn_config.kda_layers"),
        ({"model_type": "deepseek_v4"}, "lacks compress_ratios"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CorruptModel, match=says):
        of(**changes)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelGeometry.from_config(tmp_path) == ModelGeometry.from_config(tmp_path / "config.json") == of()
    bad = tmp_path / "broken.json"
    bad.write_text('{"a": 1,\n  "b": }')
    with pytest.raises(CorruptModel, match=r"broken\.json is not JSON: .* line 2, column 8"):
        ModelGeometry.from_config(bad)
    bad.write_text("[1]")
    with pytest.raises(CorruptModel, match="holds a JSON list"):
        ModelGeometry.from_config(bad)
    with pytest.raises(ModelNotFound, match=r"nothing\.json cannot be read"):
        ModelGeometry.from_config(tmp_path / "nothing.json")


def test_json_nested_beyond_all_sense() -> None:
    with pytest.raises(CorruptModel, match="nests its values too deeply"):
        parse_config('{"a":' * 100_000, "deep.json")


REFUSED = [
    ("latent", {"model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 8}),
    ("recurrent state", {"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 2}),
    ("share keys", {"model_type": "gemma3n_text", "num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 4}),
    ("within chunks", {"model_type": "llama4_text"}),
    ("encoder-decoder", {"is_encoder_decoder": True}),
    ("no attention", {"model_type": "nemotron_h", "hybrid_override_pattern": "*-*-"}),
    (
        "index",
        {
            "model_type": "minimax_m3",
            "sparse_attention_config": {"use_sparse_attention": True, "sparse_attention_freq": [1] * 4},
        },
    ),
    ("differ in KV heads", {"model_type": "gemma4_text", "global_head_dim": 32}),
]


@pytest.mark.parametrize(("reason", "changes"), REFUSED, ids=[reason for reason, _ in REFUSED])
def test_the_engine_refuses_what_its_blocks_cannot_hold(reason: str, changes: dict[str, Any]) -> None:
    geometry = of(**changes)
    with pytest.raises(UnsupportedModel, match=f"LlamaForCausalLM cannot run here: .*{reason}"):
        CacheLayout.of(geometry, 16)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [*LLAMA, "head_dim", "sliding_window", "layer_types", "kv_lora_rank", "rope_scaling", "text_config"]
        ),
        st.none()
        | st.booleans()
        | st.integers(-3, 300)
        | st.floats(allow_nan=True)
        | st.text(max_size=5)
        | st.lists(st.integers(0, 3) | st.text(max_size=4), max_size=5)
        | st.sampled_from(["gemma2", "falcon", "jamba", "mamba2", "qwen3_next"]),
        max_size=6,
    )
)
def test_any_value_is_read_or_refused_by_name(changes: dict[str, Any]) -> None:
    try:
        geometry = ModelGeometry.from_config({**LLAMA, **changes})
    except InputError as error:
        assert len(str(error)) > 20  # noqa: PT017
    else:
        assert geometry.bytes_per_token() >= 0
