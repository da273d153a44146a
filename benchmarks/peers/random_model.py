"""A model folder of Qwen2.5-1.5B's geometry with random weights: its speed is that of the real one.

Its architecture is Llama's, which has the same products (Qwen2 adds three bias vectors a layer, a ten-thousandth of
the weights): so the small model's tokenizer can serve, which converters refuse for Qwen2.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GEOMETRY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def make_random_model(folder: Path, tokenizer_from: Path) -> None:
    """Write config.json, model.safetensors (3.1 GB) and the tokenizer files of another model; same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    hidden, wide = GEOMETRY["hidden_size"], GEOMETRY["intermediate_size"]
    kv = hidden // GEOMETRY["num_attention_heads"] * GEOMETRY["num_key_value_heads"]

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weights = {"model.embed_tokens.weight": random(GEOMETRY["vocab_size"], hidden), "model.norm.weight": ones.clone()}
    for layer in range(GEOMETRY["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            weights[f"{at}.self_attn.{name}_proj.weight"] = random(rows, hidden)
        weights[f"{at}.self_attn.o_proj.weight"] = random(hidden, hidden)
        for name, rows, columns in (("gate", wide, hidden), ("up", wide, hidden), ("down", hidden, wide)):
            weights[f"{at}.mlp.{name}_proj.weight"] = random(rows, columns)
        for name in ("input", "post_attention"):
            weights[f"{at}.{name}_layernorm.weight"] = ones.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    (folder / "config.json").write_text(json.dumps(GEOMETRY, indent=2) + "\n")
