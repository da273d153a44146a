"""ModelGeometry: which layers keep keys and values, and how many bytes one token takes.

Source of the formula: bytes = 2 x layers x kv_heads x head_dim x tokens x dtype_bytes, summed over layers
that keep KV, with the *KV* heads of the model's own config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anaphora.errors import CorruptModel, UnsupportedModel

_STATE_KEYS = ("ssm_cfg", "mamba_d_state", "ssm_state_size", "state_size", "linear_num_key_heads", "kda_num_heads")
_STATE_LAYERS = {"mamba", "linear_attention", "recurrent", "conv", "lightning"}


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The keys and values one layer keeps."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """Tokens a query sees, itself included; None = all."""

    def bytes_per_token(self, dtype_bytes: int) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * dtype_bytes


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What the cache of one decoder looks like."""

    architecture: str
    model_type: str
    layers: tuple[LayerKV, ...]
    query_heads: int
    hidden_size: int
    vocab_size: int
    max_position: int | None
    """The model's own context length; None when its config names none."""

    def bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """Bytes one token adds in all layers while it is inside every window."""
        return sum(layer.bytes_per_token(dtype_bytes) for layer in self.layers)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelGeometry:
        """Read a config.json. Raises UnsupportedModel (with the reason) and CorruptModel (with the field)."""
        text = config.get("text_config") or config
        model_type = str(text.get("model_type") or config.get("model_type") or "")
        names = config.get("architectures") or [model_type or "unknown"]
        architecture = str(names[0])
        _refuse_what_keeps_no_plain_kv(architecture, text)

        def integer(*keys: str) -> int | None:
            for key in keys:
                value = text.get(key)
                if value is not None:
                    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                        raise CorruptModel(f"config.json: {key} is {value!r}; it must be a positive whole number")
                    return value
            return None

        def need(*keys: str) -> int:
            value = integer(*keys)
            if value is None:
                raise CorruptModel(f"config.json of {architecture} lacks {' / '.join(keys)}; the model cannot be sized")
            return value

        num_layers = need("num_hidden_layers", "n_layer", "num_layers", "n_layers")
        query_heads = need("num_attention_heads", "n_head", "n_heads", "num_heads")
        hidden = need("hidden_size", "n_embd", "d_model", "hidden_dim")
        head_dim = integer("head_dim")
        if head_dim is None:
            if hidden % query_heads:
                raise CorruptModel(
                    f"config.json: hidden_size {hidden} is not divisible by {query_heads} heads; set head_dim"
                )
            head_dim = hidden // query_heads
        kv_heads = integer("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
        if model_type == "falcon" and not text.get("new_decoder_architecture"):
            kv_heads = 1 if text.get("multi_query", True) else query_heads
        elif kv_heads is None:
            kv_heads = 1 if text.get("multi_query") else query_heads
        if query_heads % kv_heads:
            raise CorruptModel(f"config.json: {query_heads} query heads are not divisible by {kv_heads} KV heads")
        windows = _windows(model_type, text, num_layers)
        return cls(
            architecture=architecture,
            model_type=model_type,
            layers=tuple(LayerKV(kv_heads, head_dim, head_dim, window) for window in windows),
            query_heads=query_heads,
            hidden_size=hidden,
            vocab_size=need("vocab_size"),
            max_position=integer("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
        )


def _refuse_what_keeps_no_plain_kv(architecture: str, text: Mapping[str, Any]) -> None:
    reason = None
    kinds = {str(kind) for kind in text.get("layer_types") or ()}
    if text.get("kv_lora_rank"):
        reason = "its attention keeps a latent (MLA), not keys and values"
    elif any(text.get(key) for key in _STATE_KEYS) or kinds & _STATE_LAYERS or text.get("hybrid_override_pattern"):
        reason = "some of its layers keep a recurrent state instead of keys and values"
    elif text.get("is_encoder_decoder"):
        reason = "it is an encoder-decoder model"
    elif text.get("num_kv_shared_layers"):
        reason = "some of its layers share keys and values across layers"
    elif "chunked_attention" in kinds or text.get("attention_chunk_size"):
        reason = "some of its layers attend within chunks"
    if reason:
        raise UnsupportedModel(
            f"{architecture} cannot run here: {reason}. Serve it with vLLM or llama.cpp, "
            "or choose a decoder whose every layer keeps plain keys and values"
        )


def _windows(model_type: str, text: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """One window per layer, from `layer_types` or the older keys of each family."""
    window = text.get("sliding_window")
    if not isinstance(window, int) or window <= 0:
        return (None,) * num_layers
    kinds = text.get("layer_types")
    if kinds:
        if len(kinds) != num_layers:
            raise CorruptModel(f"config.json: layer_types names {len(kinds)} layers, the model has {num_layers}")
        return tuple(window if "sliding" in str(kind) else None for kind in kinds)
    if model_type.startswith("qwen"):  # these switch windows on apart, from a layer on
        if not text.get("use_sliding_window"):
            return (None,) * num_layers
        first = int(text.get("max_window_layers", 28))
        return tuple(window if i >= first else None for i in range(num_layers))
    if model_type == "gemma2":
        return tuple(window if i % 2 == 0 else None for i in range(num_layers))
    if model_type.startswith("gemma3") or model_type == "cohere2":
        default = 4 if model_type == "cohere2" else 6
        pattern = int(text.get("sliding_window_pattern", text.get("_sliding_window_pattern", default)))
        return tuple(window if (i + 1) % pattern else None for i in range(num_layers))
    return (window,) * num_layers
