"""The recurrent state of each family that has one, from its own keys (one line per family in the table)."""

from __future__ import annotations

from collections.abc import Callable

from anaphora.errors import UnsupportedModel
from anaphora.geometry.fields import Fields
from anaphora.geometry.layers import RecurrentState

_DTYPES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


def _state_bytes(fields: Fields, default: int | None) -> int | None:
    """The config's dtype of the recurrent state; "auto" and absence mean the default."""
    for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        name = fields.raw.get(key)
        if isinstance(name, str):
            return _DTYPES.get(name.removeprefix("torch."), default)
    return default


def _mamba1(fields: Fields) -> RecurrentState:
    """Mamba (Gu & Dao 2023): one channel a head."""
    prefixed = fields.get("mamba_d_state") is not None
    expand, state, kernel = (
        ("mamba_expand", "mamba_d_state", "mamba_d_conv") if prefixed else ("expand", "state_size", "conv_kernel")
    )
    channels = None if prefixed else fields.integer("intermediate_size")
    channels = channels or (fields.integer(expand) or 2) * fields.need("hidden_size")
    return RecurrentState(
        "mamba", channels, 1, fields.need(state), conv_channels=channels, conv_kernel=fields.integer(kernel) or 4
    )


def _mamba2(
    heads: str, head_dim: str, state: str, groups: str, kernel: str, expand: str, state_bytes: int | None = None
) -> Callable[[Fields], RecurrentState]:
    """Mamba-2 (Dao & Gu 2024), with the spellings of one family."""

    def build(fields: Fields) -> RecurrentState:
        num_heads = fields.need(heads)
        width = (fields.integer(expand) or 2) * fields.need("hidden_size")
        width = fields.integer("mamba_d_ssm") or width
        dim = fields.get(head_dim)
        dim = dim if isinstance(dim, int) and dim > 0 else width // num_heads
        return RecurrentState(
            "mamba2",
            num_heads,
            dim,
            fields.need(state),
            conv_channels=num_heads * dim,
            conv_kernel=fields.integer(kernel) or 4,
            groups=fields.integer(groups) or 1,
            state_bytes=_state_bytes(fields, state_bytes),
        )

    return build


def _gated_delta_net(fields: Fields) -> RecurrentState:
    """Gated DeltaNet (Yang et al. 2024), as Qwen3-Next has it."""
    key_heads, value_heads = fields.need("linear_num_key_heads"), fields.need("linear_num_value_heads")
    key_dim, value_dim = fields.need("linear_key_head_dim"), fields.need("linear_value_head_dim")
    return RecurrentState(
        "gated_delta_net",
        value_heads,
        value_dim,
        key_dim,
        conv_channels=2 * key_heads * key_dim + value_heads * value_dim,
        conv_kernel=fields.integer("linear_conv_kernel_dim") or 4,
        state_bytes=_state_bytes(fields, None),
    )


def _kimi_delta(fields: Fields) -> RecurrentState:
    """Kimi Delta Attention: the recurrent state stays in float32. A bounded gate has kernels of its own."""
    given = fields.mapping("linear_attn_config")
    own = Fields({**given, "architectures": [fields.architecture]})
    family = "kda" if given.get("gate_lower_bound") is None else "bounded_kda"
    heads, dim = own.need("num_attention_heads"), own.need("head_dim")
    kernel = own.integer("short_conv_kernel_size") or 4
    return RecurrentState(
        family, heads, dim, dim, conv_channels=3 * heads * dim, conv_kernel=kernel, state_bytes=_state_bytes(fields, 4)
    )


def _short_conv(fields: Fields) -> RecurrentState:
    """LFM2: a gated convolution over the last `conv_L_cache` tokens and nothing else."""
    channels = fields.integer("conv_dim") or fields.need("hidden_size")
    return RecurrentState(
        "short_conv", 0, 0, 0, conv_channels=channels, conv_kernel=fields.integer("conv_L_cache") or 3
    )


def _linear(fields: Fields) -> RecurrentState:
    """Lightning attention: one head_dim x head_dim matrix a head."""
    heads = fields.need("num_attention_heads")
    dim = fields.integer("head_dim") or fields.need("hidden_size") // heads
    return RecurrentState("linear_attention", heads, dim, dim)


_OF_MAMBA2 = _mamba2("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_expand")
_OF_NEMOTRON = _mamba2(
    "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "expand", state_bytes=4
)
STATES: dict[str, Callable[[Fields], RecurrentState]] = {
    "bailing_hybrid": _linear,
    "bailing_moe_linear": _linear,
    "bamba": _OF_MAMBA2,
    "falcon_h1": _OF_MAMBA2,
    "falcon_mamba": _mamba1,
    "granitemoehybrid": _OF_MAMBA2,
    "jamba": _mamba1,
    "kimi_linear": _kimi_delta,
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
    "mamba": _mamba1,
    "mamba2": _mamba2("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel", "expand"),
    "minimax": _linear,
    "minimax_m1": _linear,
    "minimax_text_01": _linear,
    "nemotron_h": _OF_NEMOTRON,
    "nemotron_h_puzzle": _OF_NEMOTRON,
    "olmo_hybrid": _gated_delta_net,
    "qwen3_5_moe_text": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_next": _gated_delta_net,
    "zamba2": _mamba2(
        "n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv", "mamba_expand"
    ),
}


def state_of(fields: Fields) -> RecurrentState:
    """The state every recurrent layer of this model keeps. Raises UnsupportedModel for a family not in the table."""
    build = STATES.get(fields.model_type)
    if build is None:
        raise UnsupportedModel(
            f"{fields.architecture}: the state of its recurrent layers is not known. "
            f"Known are: {', '.join(sorted(STATES))}"
        )
    return build(fields)
