"""Tiny model folders with random weights, made on the spot."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig


def save_tiny_model(folder: Path, config: PreTrainedConfig, seed: int = 0) -> Path:
    """Random weights for `config`, drawn wide so that logits differ by far more than float32 rounding."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5 * (3.0 if "embed" in name else 1.0))
    model.save_pretrained(folder)
    return folder


def save_byte_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer of 256 bytes and <|end|>, id 256, which ends a sequence."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    return folder


def tiny_llama(folder: Path, *, max_position: int = 512, seed: int = 0, head_dim: int = 8) -> Path:
    """Two layers, 4 query and 2 KV heads, 257 tokens; config, weights and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        bos_token_id=None,
        eos_token_id=256,
        tie_word_embeddings=True,
    )
    save_tiny_model(folder, config, seed)
    return save_byte_tokenizer(folder)
