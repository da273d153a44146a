"""Parameters of a model counted from its config: all of them, those used per token, and by place.

Norms, biases and router weights are counted where the family is known to have them; the rest is a sum of the
matrices. The count is checked against safetensors headers when those are at hand (geometry/hub.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anaphora.geometry.fields import Fields
from anaphora.geometry.layers import Keeps, LayerKV, RecurrentState
from anaphora.geometry.reading import head_dim_of

_PLAIN_MLP = {
    *("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "nemotron"),
    *("nemotron_h", "opt", "persimmon", "phi", "starcoder2", "whisper", "xglm", "RefinedWeb", "RefinedWebModel"),
}
"""Two matrices in the feed-forward part instead of three."""
_EVERY_BIAS = {"bloom", "codegen", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "phi", "starcoder2", "whisper", "xglm"}
_QKV_BIAS = {"qwen", "qwen2", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "chatglm"}
_POSITIONS = {"gpt2", "gpt_bigcode", "opt"}
"""Learned positions take a row each."""
_GATED_VISION = {"pixtral", "qwen2_5_vl", "glm4v", "glm4v_moe"}


@dataclass(frozen=True, slots=True)
class Parameters:
    """How many weights a model has, and where: engines quantise the matrices of the layers, not the rest."""

    embedding: int
    """Token embedding, output head and learned positions."""
    attention: int = 0
    """Matrices of what mixes tokens: attention and recurrent layers."""
    dense: int = 0
    """Matrices of dense feed-forward parts and shared experts."""
    experts: int = 0
    """Matrices of routed experts."""
    other: int = 0
    """Norms, biases, routers, convolutions."""
    vision: int = 0
    """Vision tower and projector, or the encoder."""
    active_experts: int = 0
    """Expert weights one token uses."""

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.dense + self.experts + self.other + self.vision

    @property
    def active(self) -> int:
        """Weights that take part in one token; equal to `total` for a dense model."""
        return self.total - self.experts + self.active_experts


def count_parameters(fields: Fields, layers: Sequence[LayerKV]) -> Parameters:
    """Count a model from its config; draft layers (MTP) and audio towers are not counted."""
    total = Parameters(_ends(fields), vision=_vision(fields), other=fields.need("hidden_size"))
    hidden = fields.need("hidden_size")
    for i, layer in enumerate(layers):
        attention, other = _mixer(fields, layer)
        dense, experts, active, router = _feed_forward(fields, i, layer)
        norms = hidden * (1 if fields.model_type in ("nemotron_h", "cohere", "cohere2", "phi", "mamba2") else 2)
        total = replace(
            total,
            attention=total.attention + attention,
            dense=total.dense + dense,
            experts=total.experts + experts,
            active_experts=total.active_experts + active,
            other=total.other + other + router + norms,
        )
    return total


def _ends(fields: Fields) -> int:
    """Token embedding, head and learned positions."""
    vocab, hidden = fields.need("vocab_size"), fields.need("hidden_size")
    tied = fields.raw.get("tie_word_embeddings")
    tied = fields.whole.get("tie_word_embeddings") if tied is None else tied
    tied = fields.get("tie_word_embeddings", True) if tied is None else tied
    positions = 0
    if fields.model_type in _POSITIONS:
        positions = (fields.integer("max_position_embeddings") or fields.raw.get("n_positions", 0)) * hidden
    width = fields.integer("word_embed_proj_dim") or hidden
    projections = 0 if width == hidden else 2 * width * hidden
    return vocab * width * (1 if tied else 2) + positions + projections


def _vision(fields: Fields) -> int:
    """A vision transformer's matrices and the projector after it, or an encoder's; 0 where there is neither."""
    if fields.raw.get("encoder_layers"):
        hidden, wide = fields.need("hidden_size"), int(fields.raw.get("encoder_ffn_dim", 0))
        return int(fields.raw["encoder_layers"]) * (4 * hidden * hidden + 2 * hidden * wide)
    config = fields.whole.get("vision_config")
    if not isinstance(config, Mapping):
        return 0
    width = config.get("embed_dim") if "embed_dim" in config else config.get("hidden_size")
    depth = config.get("depth") or config.get("num_hidden_layers")
    if not isinstance(width, int) or not isinstance(depth, int):
        return 0
    inner = config.get("intermediate_size") or int(width * config.get("mlp_ratio", 4))
    gated = 3 if fields.whole.get("model_type") == "qwen2_5_vl" or config.get("model_type") in _GATED_VISION else 2
    patch = int(config.get("patch_size", 14)) ** 2 * int(config.get("temporal_patch_size", 1)) * 3 * width
    merged = width * int(config.get("spatial_merge_size", 1)) ** 2
    out = int(config.get("out_hidden_size") or fields.need("hidden_size"))
    mergers = 1 + len(config.get("deepstack_visual_indexes") or ())
    return depth * (4 * width * width + gated * width * inner) + patch + mergers * merged * (merged + out)


def _mixer(fields: Fields, layer: LayerKV) -> tuple[int, int]:
    """(matrices, other weights) of what mixes tokens: attention, a state, or both."""
    linear = other = 0
    if layer.state is not None:
        linear, other = _state(fields, layer.state)
    if layer.kv_heads or layer.keeps in (Keeps.SHARED, Keeps.CROSS, Keeps.COMPRESSED):
        latent = layer.keeps is Keeps.LATENT or fields.raw.get("kv_lora_rank")
        attention, more = _latent(fields) if latent else _attention(fields, layer)
        linear, other = linear + attention, other + more
    return linear, other


def _attention(fields: Fields, layer: LayerKV) -> tuple[int, int]:
    hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    key = layer.key_dim or head_dim_of(fields)
    value, kv_heads = layer.value_dim or key, layer.kv_heads or (fields.integer("num_key_value_heads") or heads)
    if layer.keeps is Keeps.SHARED:
        kv_heads = 0
    gate = 2 if fields.raw.get("attn_output_gate") or fields.model_type == "qwen3_next" else 1
    outputs = heads * key * gate + kv_heads * (key + value)
    if layer.kv_heads and any(cache.fixed_entries for cache in layer.side):
        return 2 * (hidden * outputs + heads * value * hidden), 2 * (outputs + hidden)  # cross attention beside its own
    bias = 0
    if fields.model_type in _EVERY_BIAS or fields.raw.get("attention_bias"):
        bias = outputs + hidden
    elif fields.model_type in _QKV_BIAS:
        bias = outputs
    return hidden * outputs + heads * value * hidden, bias


def _latent(fields: Fields) -> tuple[int, int]:
    """MLA: queries through a low rank or not, one projection down to the latent, one up."""
    hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    rank, rope = fields.need("kv_lora_rank"), fields.count("qk_rope_head_dim")
    nope, value = fields.need("qk_nope_head_dim"), fields.need("v_head_dim")
    query = fields.integer("q_lora_rank") if fields.get("q_lora_rank") else None
    queries = hidden * query + query * heads * (nope + rope) if query else hidden * heads * (nope + rope)
    linear = queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    return linear, rank + (query or 0)


def _state(fields: Fields, state: RecurrentState) -> tuple[int, int]:
    """The projections around a recurrent state, by family; convolutions and gates are small."""
    hidden = fields.need("hidden_size")
    inner = state.heads * state.head_dim
    channels = state.conv_channels + 2 * state.groups * state.state_dim
    conv = channels * (state.conv_kernel + 1)
    if state.family == "mamba":
        rank = fields.integer("mamba_dt_rank") or fields.integer("time_step_rank") or -(-hidden // 16)
        linear = hidden * 2 * inner + inner * (rank + 2 * state.state_dim) + rank * inner + inner * hidden
        return linear, conv + inner * (state.state_dim + 2)
    if state.family == "mamba2":
        return hidden * (inner + channels + state.heads) + inner * hidden, conv + 3 * state.heads + inner
    if state.family == "gated_delta_net":
        linear = hidden * (state.conv_channels + inner + 2 * state.heads) + inner * hidden
        return linear, channels * state.conv_kernel + 2 * state.heads + state.head_dim
    if state.family == "short_conv":
        return hidden * 3 * channels + channels * hidden, channels * state.conv_kernel
    if state.family in ("kda", "bounded_kda"):
        low = hidden * state.head_dim + state.head_dim * inner
        return hidden * 3 * inner + 2 * low + hidden * state.heads + inner * hidden, 3 * inner * state.conv_kernel
    return hidden * 5 * inner, inner  # lightning attention: q, k, v, gate and output


def _feed_forward(fields: Fields, index: int, layer: LayerKV) -> tuple[int, int, int, int]:
    """(dense matrices, all experts, experts of one token, router and biases) of one layer."""
    hidden = fields.need("hidden_size")
    has_dense, has_experts = _feed_forward_kind(fields, index, layer)
    matrices = 2 if fields.model_type in _PLAIN_MLP else 3
    if has_experts:
        number, used = _experts(fields)
        width = _expert_width(fields)
        one = matrices * hidden * width
        shared = _shared_width(fields, width) * matrices * hidden
        if fields.model_type == "gpt_oss":
            return shared, number * one, used * one, hidden * number + number * (1 + 2 * width + hidden)
        return shared, number * one, used * one, hidden * number
    if not has_dense:
        return 0, 0, 0, 0
    width = _dense_width(fields, index)
    bias = width + hidden if fields.model_type in _EVERY_BIAS else 0
    return matrices * hidden * width, 0, 0, bias


def _experts(fields: Fields) -> tuple[int, int]:
    """(routed experts of a layer, how many a token uses)."""
    nested = fields.mapping("ffn_config")  # DBRX
    if nested.get("moe_num_experts"):
        return int(nested["moe_num_experts"]), int(nested.get("moe_top_k", 1))
    return fields.count("num_experts"), fields.integer("num_experts_per_tok") or 1 if fields.count("num_experts") else 0


def _feed_forward_kind(fields: Fields, index: int, layer: LayerKV) -> tuple[bool, bool]:
    """(has a dense feed-forward part, has experts)."""
    if (
        layer.state
        and layer.state.family in ("mamba", "mamba2")
        and fields.model_type in ("mamba", "mamba2", "falcon_mamba")
    ):
        return False, False
    pattern = fields.raw.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return pattern[index] == "-", pattern[index] == "E"
    named = fields.raw.get("layers_block_type")
    if named and fields.model_type == "nemotron_h":
        return named[index] == "mlp", named[index] == "moe"
    if not _experts(fields)[0]:
        return True, False
    return (False, True) if _is_sparse(fields, index) else (True, False)


def _is_sparse(fields: Fields, index: int) -> bool:
    """Whether layer `index` has experts, in the ways families say so."""
    types = fields.raw.get("mlp_layer_types")
    frequency: Any = fields.raw.get("moe_layer_freq")
    if types:
        return str(types[index]) == "sparse"
    if isinstance(frequency, list):
        return bool(frequency[index])
    if index < fields.count("first_k_dense_replace") or index in (fields.raw.get("mlp_only_layers") or ()):
        return False
    if "moe_layer_start_index" in fields.raw:
        return index >= int(fields.raw["moe_layer_start_index"])
    for step_key, offset_key in (("expert_layer_period", "expert_layer_offset"), ("interleave_moe_layer_step", "")):
        if fields.raw.get(step_key):
            step = int(fields.raw[step_key])
            return index % step == int(fields.raw.get(offset_key, step - 1))
    step = int(fields.raw.get("decoder_sparse_step") or frequency or 1)
    return (index + 1) % step == 0 if fields.raw.get("decoder_sparse_step") else index % step == 0


def _expert_width(fields: Fields) -> int:
    nested = fields.mapping("ffn_config")
    width = fields.integer("moe_intermediate_size") or nested.get("ffn_hidden_size")
    return int(width or fields.need("intermediate_size"))


def _shared_width(fields: Fields, expert: int) -> int:
    """Width of the experts every token goes through."""
    for key in ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"):
        if fields.raw.get(key):
            return int(fields.raw[key])
    if fields.model_type == "llama4_text" or fields.raw.get("enable_moe_block"):  # beside the experts
        return fields.need("intermediate_size")
    return fields.count("n_shared_experts") * expert


def _dense_width(fields: Fields, index: int) -> int:
    """Width of a dense feed-forward part. Families without the key use four times the model's width."""
    if fields.model_type == "llama4_text" and fields.raw.get("intermediate_size_mlp"):
        return int(fields.raw["intermediate_size_mlp"])
    if fields.raw.get("dense_intermediate_size"):
        return int(fields.raw["dense_intermediate_size"])
    if fields.raw.get("shared_intermediate_size") and fields.model_type == "granitemoehybrid":
        return int(fields.raw["shared_intermediate_size"])
    width = fields.get("intermediate_size")
    if isinstance(width, list):
        return int(width[index])
    if fields.model_type == "qwen":  # the first Qwen names both halves of the gated part together
        return fields.need("intermediate_size") // 2
    if fields.model_type == "lfm2":
        return _lfm2_width(fields)
    ratio = fields.raw.get("expansion_ratio", 4)
    return fields.integer("intermediate_size") or int(ratio * fields.need("hidden_size"))


def _lfm2_width(fields: Fields) -> int:
    """LFM2: two thirds of the named width, rounded up to a multiple, unless told to take it as it is."""
    width = fields.integer("block_ff_dim") or fields.need("intermediate_size")
    if fields.raw.get("block_auto_adjust_ff_dim", True):
        width = int(float(fields.raw.get("block_ffn_dim_multiplier") or 1) * int(2 * width / 3))
        step = fields.integer("block_multiple_of") or 256
        width = -(-width // step) * step
    return width
