"""Write src/anaphora/geometry/class_defaults.json: what transformers' configuration classes assume for missing keys.

Many configs name only what differs from their class (LLaVA-1.5's text_config has no layer count at all), so a
reader without the classes needs their defaults. Run it with the pinned transformers when that moves:

    python tools/make_class_defaults.py > src/anaphora/geometry/class_defaults.json
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

KEYS = """num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_size vocab_size intermediate_size
max_position_embeddings sliding_window use_sliding_window max_window_layers tie_word_embeddings
num_kv_shared_layers attention_chunk_size global_head_dim num_global_key_value_heads multi_query
kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim
num_local_experts num_experts n_routed_experts num_experts_per_tok moe_intermediate_size n_shared_experts
first_k_dense_replace linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim
linear_conv_kernel_dim mamba_d_state mamba_d_conv mamba_expand mamba_n_heads mamba_d_head mamba_n_groups
mamba_num_heads mamba_head_dim ssm_state_size mamba_headdim mamba_ngroups n_mamba_heads
state_size conv_kernel expand n_groups num_heads conv_L_cache attn_layer_period attn_layer_offset""".split()  # noqa: SIM905
MULTIMODAL = {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
NO_KV_DECODERS = {
    "reformer",
    "xlnet",
    "xlm",
    "rwkv",
    "xlstm",
    "big_bird",
    "electra",
    "ernie",
    "roformer",
    "xmod",
    "git",
}


def value(config: Any, key: str) -> Any:
    try:
        return getattr(config, key)
    except Exception:  # some classes refuse a key that differs by layer
        return None


def defaults(cls: Any) -> dict[str, int | bool]:
    """The class's own value of every key, without those that follow from other keys."""
    config = cls()
    aliases = {k for k, real in cls.attribute_map.items() if real in KEYS}
    found = {k: v for k in KEYS if k not in aliases and isinstance(v := value(config, k), (int, bool))}
    heads = found.get("num_attention_heads")
    if heads:
        try:
            other = cls(num_attention_heads=heads * 2, hidden_size=heads * 2 * 24)
        except Exception:
            return found
        if value(other, "num_key_value_heads") == heads * 2:
            found.pop("num_key_value_heads", None)
        if value(other, "head_dim") != found.get("head_dim"):
            found.pop("head_dim", None)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity(50)
    rows: dict[str, dict[str, int | bool]] = {}
    texts: dict[str, str] = {}
    for model_type in CONFIG_MAPPING_NAMES:
        try:
            cls = CONFIG_MAPPING[model_type]
            text = cls().get_text_config()
        except Exception as error:
            print(f"{model_type}: {type(error).__name__}", file=sys.stderr)
            continue
        if text.model_type != model_type:
            if model_type in MULTIMODAL:
                texts[model_type] = text.model_type
            continue
        row = defaults(cls)
        if "num_hidden_layers" in row and "hidden_size" in row and "bert" not in model_type:
            rows[model_type] = row
    wanted = ({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *texts.values(), "whisper"}) - NO_KV_DECODERS
    rows = {k: v for k, v in rows.items() if k in wanted}
    whole = {k: texts[k] for k in sorted(texts) if texts[k] in rows}
    head = {"made_by": f"tools/make_class_defaults.py, transformers {transformers.__version__}", "text_of": whole}
    lines = [f"{json.dumps(key)}: {json.dumps(head[key])}" for key in head]
    table = ",\n".join(f"{json.dumps(k)}: {json.dumps(rows[k], sort_keys=True)}" for k in sorted(rows))
    print("{" + ",\n".join([*lines, f'"defaults": {{\n{table}\n}}']) + "}")


if __name__ == "__main__":
    main()
