"""What the compact decoder is told about a model: config.json -> DecoderSpec.

One row of `FAMILIES` per model_type says in what it differs from Llama. A model that needs something no field of
the spec expresses gets no spec and goes the transformers way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from anaphora.engine.models.rope import RopeSpec, rope_spec
from anaphora.errors import CorruptModel, UnsupportedModel
from anaphora.geometry.model import ModelGeometry

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class NormNames:
    """Weights of a layer's norms before and after attention and MLP; None = no norm there."""

    attention_in: str | None
    attention_out: str | None
    mlp_in: str | None
    mlp_out: str | None


_PRE = NormNames("input_layernorm", None, "post_attention_layernorm", None)
_POST = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_SANDWICH = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder of the Llama kind: RMS norms, rotary positions, gated MLP, and what the families vary."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    ropes: tuple[RopeSpec | None, ...]
    """One per layer; None = no positions in that layer."""
    attention_scale: float
    activation: Activation = "silu"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    """Added to every norm weight: Gemma stores w - 1."""
    norm_scales_in_float32: bool = False
    """The weight is multiplied before the result is rounded to the model's dtype, not after."""
    norm_names: NormNames = _PRE
    qk_norm: Literal["head", "projection"] | None = None
    """RMS norm of queries and keys: over each head, or over the whole projection."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_weights: bool = False
    """The file holds qkv_proj and gate_up_proj instead of their parts."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    tied_embeddings: bool = False


def decoder_spec(
    config: Mapping[str, Any], geometry: ModelGeometry, max_model_len: int | None = None
) -> DecoderSpec | None:
    """The compact decoder's spec of a model, None when it has none. `max_model_len`: see models/rope.py.

    Raises CorruptModel when the config lacks what its family needs or has it in a wrong form, UnsupportedModel for
    bidirectional attention.
    """
    text = config.get("text_config") or config
    family = FAMILIES.get(geometry.model_type)
    if family is None:
        return None
    if text.get("use_bidirectional_attention"):
        raise UnsupportedModel(
            f"{geometry.architecture} cannot run here: its tokens attend to later ones, so it embeds text and does "
            "not generate. Choose a model made for generation"
        )
    layer = geometry.layers[0]
    try:
        like_llama: dict[str, Any] = {
            "activation": text.get("hidden_act", "silu"),
            "norm_eps": float(text.get("rms_norm_eps", 1e-6)),
            "attention_scale": layer.key_dim**-0.5,
            "tied_embeddings": bool(text.get("tie_word_embeddings", False)),
        }
        fields = like_llama | family(text)
        fields["activation"] = _ACTIVATIONS.get(str(fields["activation"]))
        ropes = _ropes(text, geometry, max_model_len)
        if ropes is None or fields["activation"] is None:
            return None
        return DecoderSpec(
            architecture=geometry.architecture,
            num_layers=len(geometry.layers),
            hidden_size=geometry.hidden_size,
            intermediate_size=int(text["intermediate_size"]),
            vocab_size=geometry.vocab_size,
            query_heads=geometry.query_heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.key_dim,
            ropes=ropes,
            **fields,
        )
    except KeyError as missing:
        raise CorruptModel(
            f"config.json of {geometry.architecture} lacks {missing.args[0]}; fetch the file again"
        ) from missing
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CorruptModel(
            f"config.json of {geometry.architecture} holds a value of the wrong form ({error}); fetch the file again"
        ) from error


def _ropes(
    text: Mapping[str, Any], geometry: ModelGeometry, max_model_len: int | None
) -> tuple[RopeSpec | None, ...] | None:
    """One per layer; None when the model's scaling is not known."""
    family = geometry.model_type
    head_dim = geometry.layers[0].key_dim
    given: Mapping[str, Any] = text.get("rope_parameters") or text.get("rope_scaling") or {}

    def make(parameters: Mapping[str, Any], theta: float) -> RopeSpec | None:
        factor = parameters.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
        if family == "phi3" and parameters.get("type") == "yarn":  # an early name of LongRoPE in this family
            parameters = {**parameters, "type": "longrope"}
        return rope_spec(
            parameters,
            theta=float(parameters.get("rope_theta") or theta),
            dim=int(head_dim * float(factor)) if family == "phi3" else head_dim,
            max_position=int(text["max_position_embeddings"]),
            original_max_position=text.get("original_max_position_embeddings"),
            max_model_len=max_model_len,
        )

    if family == "gemma3_text":  # its sliding layers turn by their own, unscaled theta
        nested = "full_attention" in given or "sliding_attention" in given
        full = make(given.get("full_attention") or {} if nested else given, float(text.get("rope_theta", 1e6)))
        local_theta = float(text.get("rope_local_base_freq", 1e4))
        local = make(given.get("sliding_attention") or {} if nested else {}, local_theta)
        if full is None or local is None:
            return None
        return tuple(full if layer.window is None else local for layer in geometry.layers)
    rope = make(given, float(text.get("rope_theta", _DEFAULT_THETA.get(family, 1e4))))
    if rope is None:
        return None
    if family != "smollm3":
        return (rope,) * len(geometry.layers)
    every = int(text.get("no_rope_layer_interval", 4))
    kept = text.get("no_rope_layers") or [(i + 1) % every for i in range(len(geometry.layers))]
    return tuple(rope if keeps else None for keeps in kept)


_DEFAULT_THETA = {"smollm3": 2e6}

_Family = Callable[[Mapping[str, Any]], dict[str, Any]]


def _llama(text: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(text.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bool(text.get("mlp_bias", False))}


def _qwen3(text: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(text.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias, "qk_norm": "head"}


def _gemma(text: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(text.get("attention_bias", False))
    named = text.get("hidden_act", "gelu_pytorch_tanh")
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "activation": "gelu_pytorch_tanh" if named == "gelu" else named,  # the first releases meant tanh
        "norm_offset": 1.0,
        "norm_scales_in_float32": True,
        "embedding_scale": float(text["hidden_size"]) ** 0.5,
        "tied_embeddings": bool(text.get("tie_word_embeddings", True)),
    }


def _gemma2(text: Mapping[str, Any]) -> dict[str, Any]:
    return _gemma(text) | {
        "activation": text.get("hidden_activation", "gelu_pytorch_tanh"),
        "norm_names": _SANDWICH,
        "attention_scale": float(text.get("query_pre_attn_scalar", 256)) ** -0.5,
        "attention_softcap": text.get("attn_logit_softcapping", 50.0),
        "logit_softcap": text.get("final_logit_softcapping", 30.0),
    }


def _gemma3(text: Mapping[str, Any]) -> dict[str, Any]:
    return _gemma2(text) | {
        "qk_norm": "head",
        "attention_softcap": None,  # the config has the key, the model does not use it
        "logit_softcap": text.get("final_logit_softcapping"),
    }


def _granite(text: Mapping[str, Any]) -> dict[str, Any]:
    return _llama(text) | {
        "embedding_scale": float(text.get("embedding_multiplier", 1.0)),
        "residual_scale": float(text.get("residual_multiplier", 1.0)),
        "attention_scale": float(text.get("attention_multiplier", 1.0)),
        "logit_divisor": float(text.get("logits_scaling", 1.0)),
    }


def _olmo2(text: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(text.get("attention_bias", False))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "norm_names": _POST,
        "norm_scales_in_float32": True,
        "qk_norm": "projection",
    }


FAMILIES: dict[str, _Family] = {
    "llama": _llama,
    "mistral": lambda text: {},
    "qwen2": lambda text: {"qkv_bias": True},
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": lambda text: {"fused_weights": True},
    "granite": _granite,
    "olmo2": _olmo2,
    "smollm3": lambda text: _llama(text) | {"tied_embeddings": bool(text.get("tie_word_embeddings", True))},
}
