"""A small llama's config.json and variations of it."""

from __future__ import annotations

from typing import Any

from anaphora.geometry.model import ModelGeometry

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def geometry_of(**changes: Any) -> ModelGeometry:
    """The llama above with other keys; None drops one."""
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    return ModelGeometry.from_config(config)
