"""The layers we read from a config against those transformers' own configuration class computes for it."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from anaphora.geometry.families import WORDS, is_known
from anaphora.geometry.fields import known_to_transformers
from anaphora.geometry.model import Keeps, LayerKV, ModelGeometry

ELSEWHERE = {
    "deepseek_v4": "its classes name compressed kinds; compress_ratios says more",
    "glm4_moe": "the class has no head_dim of its own and heads that do not divide",
    "glm4v_moe_text": "as glm4_moe",
    "kimi_linear": "the checkpoint's linear_attn_config says it",
    "kosmos_2_5_text_model": "layers instead of num_hidden_layers",
    "kosmos_2_text_model": "layers instead of num_hidden_layers",
    "qwen3_omni_moe_text": "heads that do not divide",
    "unlimited_ocr_text": "a window of references, not of the last tokens",
    "zamba": "its states are not described",
}
NAMED = {"bamba", "mimo_v2_flash", "minimax"}
"""Real configs of these always say which layer is which; without that we refuse instead of assuming a pattern."""
KNOWN = sorted(name for name in known_to_transformers() if is_known(name) and name not in ELSEWHERE)


def kind(layer: LayerKV) -> str:
    if layer.state is not None:
        return "both" if layer.kv_heads else "state"
    return {Keeps.SLIDING: "sliding", Keeps.CHUNKED: "chunked", Keeps.NOTHING: "nothing"}.get(layer.keeps, "full")


def attribute(config: Any, name: str) -> Any:
    try:
        return getattr(config, name)
    except Exception:  # heterogeneous classes refuse a global value
        return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", KNOWN)
def test_layers_are_those_of_the_class(model_type: str) -> None:
    transformers.logging.set_verbosity(50)
    config = CONFIG_MAPPING[model_type]()
    values = config.to_dict()
    named = values.pop("layer_types", None)  # so that our own rule is what is tested
    if model_type in NAMED:
        values["layer_types"] = named or attribute(config, "layer_types")
    types = attribute(config, "layer_types")
    if model_type == "nemotron_h":
        types = values.get("layers_block_type")
    geometry = ModelGeometry.from_config({**values, "architectures": [model_type]})
    if types and not values.get("num_kv_shared_layers"):
        assert [kind(layer) for layer in geometry.layers] == [WORDS[name] for name in types]
    plain = next((layer for layer in geometry.layers if layer.kv_heads and layer.keeps is not Keeps.LATENT), None)
    if plain is not None and model_type != "minicpm3":
        assert plain.key_dim == (attribute(config, "head_dim") or plain.key_dim)
        assert plain.kv_heads == (attribute(config, "num_key_value_heads") or plain.kv_heads)


def test_enough_classes_are_known() -> None:
    assert len(KNOWN) > 130
