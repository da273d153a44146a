"""Tables of the families: which model types are known, and which of their layers do what.

A kind per layer, as letters while a pattern is written down and as words afterwards:

    f full      s sliding      c chunked      l linear (a recurrent state)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from anaphora.errors import CorruptModel
from anaphora.geometry.fields import Fields, known_to_transformers

_LETTERS = {"f": "full", "s": "sliding", "c": "chunked", "l": "state", "n": "nothing", "b": "both"}
WORDS: dict[str, str] = {
    "full_attention": "full",
    "attention": "full",
    "global_attention": "full",
    "full": "full",
    "sliding_attention": "sliding",
    "sliding_window": "sliding",
    "swa": "sliding",
    "chunked_attention": "chunked",
    "indexed_attention": "full",
    "reference_sliding_attention": "full",
    "linear_attention": "state",
    "mamba": "state",
    "mamba2": "state",
    "conv": "state",
    "hybrid": "both",
    "moe": "nothing",
    "mlp": "nothing",
}
"""Names of layers in `layer_types` and `layers_block_type` -> kind."""

PATTERNS: dict[str, str] = {
    "afmoe": "sssf",
    "cohere2": "sssf",
    "cohere2_moe": "sssf",
    "cohere_compass_text": "f",
    "cwm": "fsss",
    "diffusion_gemma_text": "sssssf",
    "exaone4": "sssf",
    "exaone_moe": "sssf",
    "gemma2": "sf",
    "gemma3_text": "sssssf",
    "gemma3n_text": "ssssf",
    "gemma4_text": "sssssf",
    "gemma4_unified_text": "sssssf",
    "gpt_oss": "sf",
    "granite_swa": "fsss",
    "granitemoehybrid": "l",
    "laguna": "f",
    "mellum": "f",
    "t5gemma2_decoder": "sssssf",
    "granitemoe_swa": "fsss",
    "llama4_text": "cccf",
    "muse_glimmer_text": "sssf",
    "olmo3": "sssf",
    "olmo_hybrid": "lllf",
    "qwen3_5_moe_text": "lllf",
    "qwen3_5_text": "lllf",
    "qwen3_next": "lllf",
    "vaultgemma": "sf",
}
"""What the configuration class fills in when the config names no `layer_types`."""

_ENDS_FULL = {"gemma4_text", "gemma4_unified_text"}
_INTERVAL_KEYS = (
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "full_attention_interval",
    "full_attn_interval",
    "no_rope_layer_interval",
)

MLA_TYPES = {
    "axk1",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_ocr2_text",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
    "kimi_linear",
    "kimi_vl",
    "longcat_flash",
    "mistral4",
    "mistral_large4_text",
    "pangu_ultra_moe",
    "sarvam_mla",
    "unlimited_ocr_text",
    "youtu",
}
"""Types whose `kv_lora_rank` means that the latent itself is cached."""

_REMOTE_CODE = """aquila aquilamoe arctic baichuan bailing bailing_moe chatglm codeshell decilm deci deepseek
deepseek_vl_v2 dots_vlm ernie falcon_mamba glm gpt_neox_japanese grok-1 h2ovl_chat hunyuan hunyuan_moe
internlm internlm2 internvl_chat jais kimi_k2 kimi_k25 kimi_vl llama_nemotron minicpm minicpm3 minicpmo minicpmv mimo
minimax_m3 minimax_m1 minimax_text_01 nemotron-nas openelm orion ouro ovis ovis2_5 phi3_v phi3small phi4mm phi-msft
pangu_ultra_moe plamo qwen RefinedWeb RefinedWebModel skywork solar step3_text step3 telechat telechat2 xverse
yi zhinao refact mimo_v2 llava_llama llava_qwen ernie4_5_moe_vl kimi_k3 mpt mosaic_gpt dbrx
bailing_moe_v2 bailing_moe_linear tele_chat nvlm_d molmo eagle_chat paligemma xgenmm deepseek_ocr""".split()  # noqa: SIM905
"""Known types without a configuration class in transformers."""

_UNSUPPORTED = """axk2 beam bigbird_pegasus cpmant data2vec-text dory dots3_note_text flint glm5_next_text
hrm_text hy_v4 hy_v4_vl_text inkling2_loop_text inkling2_text inkling_text kolibri1 lara_mini lfm3 moshi muse_spark_text
prophetnet qwen4_exp_text recurrent_gemma zaya diffllama doge jetmoe""".split()  # noqa: SIM905
"""Types with a configuration class whose layers keep something this package does not describe yet."""


def is_known(model_type: str) -> bool:
    """Whether the layers of this model type are understood."""
    if model_type in _UNSUPPORTED:
        return False
    return model_type in known_to_transformers() or model_type in _REMOTE_CODE or model_type in PATTERNS


def kinds_of(fields: Fields, num_layers: int) -> list[str]:
    """One of full, sliding, chunked, state, both, nothing for each layer. Raises CorruptModel."""
    reader = _READERS.get(fields.model_type)
    if reader is not None:
        return reader(fields, num_layers)
    named = fields.sequence("layer_types", num_layers) or fields.sequence("layers_block_type", num_layers)
    if named:
        return [_word(fields, name) for name in named]
    pattern = _pattern(fields)
    if pattern:
        kinds = [_LETTERS[pattern[i % len(pattern)]] for i in range(num_layers)]
        if fields.model_type in _ENDS_FULL:
            kinds[-1] = "full"
        return kinds
    window = fields.get("sliding_window")
    if not window:
        return ["full"] * num_layers
    first = fields.get("max_window_layers", 0) if fields.model_type in known_to_transformers() else 0
    return ["sliding" if i >= first else "full" for i in range(num_layers)]


def window_of(fields: Fields) -> int | None:
    """The sliding window in tokens; None where the family's switch turns it off."""
    if fields.get("use_sliding_window") is False and fields.model_type in known_to_transformers():
        return None
    value = fields.get("sliding_window") or fields.get("sliding_window_size")
    if isinstance(value, (list, tuple)):  # one per layer, all the same where it is set
        sizes = {size for size in value if size}
        if len(sizes) > 1:
            raise CorruptModel(f"config.json: sliding_window names several sizes {sorted(sizes)}; one is understood")
        value = sizes.pop() if sizes else None
    if not value:
        return None
    if not isinstance(value, int) or value < 0:
        raise CorruptModel(f"config.json: sliding_window is {value!r}; it must be a positive whole number or null")
    return value


def _word(fields: Fields, name: Any) -> str:
    kind = WORDS.get(str(name))
    if kind is None:
        raise CorruptModel(
            f"config.json of {fields.architecture}: layer type {name!r} is not one of {', '.join(sorted(WORDS))}"
        )
    return kind


def _pattern(fields: Fields) -> str | None:
    """The class's pattern, with the config's own interval where it names one."""
    pattern = PATTERNS.get(fields.model_type)
    for key in _INTERVAL_KEYS:
        value = fields.raw.get(key)
        if isinstance(value, str) and set(value) <= {"L", "G"}:
            return value.replace("L", "s").replace("G", "f")
        if isinstance(value, int) and value > 0 and pattern:
            many = pattern[0] if pattern[0] != "f" else pattern[-1]
            return many * (value - 1) + "f"
    return pattern


def _from_numbers(*keys: str, one: str, other: str, first: int = 0) -> Callable[[Fields, int], list[str]]:
    """Layers listed by number are `one`, the rest `other`."""

    def read(fields: Fields, num_layers: int) -> list[str]:
        listed = next((found for key in keys if (found := fields.sequence(key)) is not None), None)
        if listed is None:
            named = fields.sequence("layer_types", num_layers) or fields.sequence("layers_block_type", num_layers)
            if named is None:
                raise CorruptModel(f"config.json of {fields.architecture} lacks {' / '.join(keys)} or layer_types")
            return [_word(fields, name) for name in named]
        chosen = {int(i) - first for i in listed}
        return [one if i in chosen else other for i in range(num_layers)]

    return read


def _flags(*keys: str, on: str, off: str) -> Callable[[Fields, int], list[str]]:
    """A list with 1 for `on` and 0 for `off`, one per layer; without it the general way."""

    def read(fields: Fields, num_layers: int) -> list[str]:
        for key in keys:
            flags = fields.get(key) and fields.sequence(key, num_layers)  # Llama 4's empty list: the class's pattern
            if flags:
                return [on if flag else off for flag in flags]
        pattern = PATTERNS.get(fields.model_type)
        named = fields.sequence("layer_types", num_layers)
        if named:
            return [_word(fields, name) for name in named]
        if pattern is None:
            raise CorruptModel(f"config.json of {fields.architecture} lacks {' / '.join(keys)}")
        return [_LETTERS[_pattern(fields)[i % len(pattern)]] for i in range(num_layers)]  # type: ignore[index]

    return read


def _period(fields: Fields, num_layers: int) -> list[str]:
    """Jamba: attention every `attn_layer_period` layers from `attn_layer_offset` on."""
    period, offset = fields.need("attn_layer_period"), fields.count("attn_layer_offset")
    return ["full" if i % period == offset else "state" for i in range(num_layers)]


def _letters_of_nemotron(fields: Fields, num_layers: int) -> list[str]:
    """`hybrid_override_pattern`: M mamba, * attention, - mlp, E experts; newer: `layers_block_type`."""
    text = fields.get("hybrid_override_pattern")
    if isinstance(text, str):
        if len(text) != num_layers or set(text) - set("M*-E"):
            raise CorruptModel(
                f"config.json: hybrid_override_pattern {text!r} must hold one of M * - E for each of its "
                f"{num_layers} layers"
            )
        return [{"M": "state", "*": "full"}.get(letter, "nothing") for letter in text]
    named = fields.sequence("layers_block_type", num_layers) or fields.sequence("layer_types", num_layers)
    if named is None:
        raise CorruptModel(f"config.json of {fields.architecture} lacks hybrid_override_pattern / layers_block_type")
    return [_word(fields, name) for name in named]


def _kimi_linear(fields: Fields, num_layers: int) -> list[str]:
    """`linear_attn_config` numbers its layers from 1."""
    linear = fields.mapping("linear_attn_config").get("kda_layers")
    if not isinstance(linear, Sequence):
        raise CorruptModel(f"config.json of {fields.architecture} lacks linear_attn_config.kda_layers")
    chosen = {int(i) - 1 for i in linear}
    return ["state" if i in chosen else "full" for i in range(num_layers)]


def _every(kind: str) -> Callable[[Fields, int], list[str]]:
    return lambda fields, num_layers: [kind] * num_layers


def _lfm2(fields: Fields, num_layers: int) -> list[str]:
    named = fields.sequence("layer_types", num_layers)
    if named:
        return [_word(fields, name) for name in named]
    listed = fields.sequence("full_attn_idxs")
    chosen = set(range(num_layers)) if listed is None else {int(i) for i in listed}
    return ["full" if i in chosen else "state" for i in range(num_layers)]


def _groups_of(fields: Fields, num_layers: int) -> list[str]:
    """Ling linear: the last layer of every `layer_group_size` is full."""
    size = fields.need("layer_group_size")
    return ["full" if (i + 1) % size == 0 else "state" for i in range(num_layers)]


_READERS: dict[str, Callable[[Fields, int], list[str]]] = {
    "bailing_hybrid": _groups_of,
    "bailing_moe_linear": _groups_of,
    "bamba": _from_numbers("attn_layer_indices", one="full", other="state"),
    "falcon_h1": _every("both"),
    "falcon_mamba": _every("state"),
    "jamba": _period,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "llama4_text": _flags("no_rope_layers", on="chunked", off="full"),
    "mamba": _every("state"),
    "mamba2": _every("state"),
    "mimo_v2": _flags("hybrid_layer_pattern", on="sliding", off="full"),
    "mimo_v2_flash": _flags("hybrid_layer_pattern", on="sliding", off="full"),
    "minimax": _flags("attn_type_list", on="full", off="state"),
    "minimax_m1": _flags("attn_type_list", on="full", off="state"),
    "minimax_text_01": _flags("attn_type_list", on="full", off="state"),
    "nemotron_h": _letters_of_nemotron,
    "nemotron_h_puzzle": _letters_of_nemotron,
    "zamba2": _from_numbers("hybrid_layer_ids", one="both", other="state"),
}
"""Families that say which layer does what in a way of their own."""
