"""Reading one config.json: old and new spellings, class defaults, and errors that name the key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from anaphora.errors import CorruptModel, ModelNotFound

SPELLINGS: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers", "num_transformer_layers", "decoder_layers"),
    "num_attention_heads": (
        "n_head",
        "n_heads",
        "num_heads",
        "num_query_heads",
        "decoder_attention_heads",
        "attention_heads",
    ),
    "num_key_value_heads": (
        "num_kv_heads",
        "n_head_kv",
        "kv_n_heads",
        "n_kv_heads",
        "num_attention_groups",
        "num_query_groups",
    ),
    "hidden_size": ("n_embd", "n_embed", "d_model", "hidden_dim", "model_dim"),
    "head_dim": ("attention_head_dim", "kv_channels", "hidden_size_per_head"),
    "vocab_size": ("padded_vocab_size",),
    "intermediate_size": ("ffn_hidden_size", "n_inner", "ffn_dim", "ff_intermediate_size", "decoder_ffn_dim"),
    "num_experts": ("n_routed_experts", "num_local_experts", "moe_num_experts", "num_moe_experts"),
    "num_experts_per_tok": (
        "num_experts_per_token",
        "moe_topk",
        "moe_k",
        "moe_top_k",
        "top_k_experts",
        "num_selected_experts",
    ),
    "n_shared_experts": ("num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "moe_intermediate_size": ("expert_ffn_hidden_size", "expert_hidden_dim"),
}
"""Key as transformers spells it today -> the older or remote-code spellings, first one wins."""

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config")
_LIMITS = {"num_hidden_layers": 1 << 14}
_CORE = {"num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"}


@cache
def _class_defaults() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_name("class_defaults.json").read_text(encoding="utf-8"))
    return table


def known_to_transformers() -> frozenset[str]:
    """Model types whose configuration class is in the table of class defaults."""
    return frozenset(_class_defaults()["defaults"])


def load_config(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """A mapping as it is; a path to a config.json or its folder read. Raises ModelNotFound, CorruptModel."""
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelNotFound(f"{path} cannot be read ({error}); give a config.json or a folder that holds one") from None
    return parse_config(text, str(path))


def parse_config(text: str, name: str) -> Mapping[str, Any]:
    """JSON text -> mapping. Raises CorruptModel with line and column."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise CorruptModel(
            f"{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}. Download it again."
        ) from None
    except RecursionError:
        raise CorruptModel(f"{name} nests its values too deeply for a config.json. Download it again.") from None
    if not isinstance(config, dict):
        raise CorruptModel(f"{name} holds a JSON {type(config).__name__}; a config.json is an object")
    return config


class Fields:
    """One model's language part, read by key.

    A missing key takes the value of the configuration class, as transformers would; the four that make up the
    model (layers, heads, width, vocabulary) only in a nested part, where leaving them out is usual.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        table = _class_defaults()
        self.whole = config
        self.raw, parent = _language_part(config)
        outer = str(config.get("model_type") or "")
        self.model_type = str(self.raw.get("model_type") or "")
        if self.raw is config or not self.model_type:
            self.model_type = table["text_of"].get(outer, outer)
        names = config.get("architectures") or self.raw.get("architectures") or [self.model_type or "unknown"]
        self.architecture = str(names[0]) if isinstance(names, list) and names else str(names)
        defaults: dict[str, Any] = table["defaults"].get(self.model_type, {})
        self._defaults = {k: v for k, v in defaults.items() if parent or k not in _CORE}
        self.assumed: dict[str, Any] = {}
        """Keys that came from the class, not from the config."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value under `key` or one of its spellings; else the class default; else `default`."""
        for name in (key, *SPELLINGS.get(key, ())):
            value = self.raw.get(name)
            if value is not None:
                return value
        for name in (key, *SPELLINGS.get(key, ())):
            if name in self._defaults and name not in self.raw:
                self.assumed[key] = self._defaults[name]
                return self._defaults[name]
        return default

    def integer(self, key: str, default: int | None = None) -> int | None:
        """A positive whole number or None. Raises CorruptModel."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _LIMITS.get(key, 1 << 40):
            raise CorruptModel(f"config.json: {key} is {value!r}; it must be a positive whole number a model can have")
        return value

    def need(self, key: str) -> int:
        """As `integer`, but it must be there."""
        value = self.integer(key)
        named = self.raw.get("layers_block_type")
        if value is None and key == "num_hidden_layers" and isinstance(named, list) and named:
            return len(named)
        if value is None:
            spelled = " / ".join((key, *SPELLINGS.get(key, ())))
            raise CorruptModel(f"config.json of {self.architecture} lacks {spelled}; the model cannot be sized")
        return value

    def count(self, key: str) -> int:
        """A whole number, 0 when absent."""
        return 0 if self.get(key) in (0, None, False) else self.need(key)

    def sequence(self, key: str, length: int | None = None) -> Sequence[Any] | None:
        """A list or None. Raises CorruptModel when it has not `length` items at least."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise CorruptModel(f"config.json: {key} is {value!r}; it must be a list")
        if length is not None and len(value) < length:
            raise CorruptModel(f"config.json: {key} names {len(value)} layers, the model has {length}")
        return value if length is None else value[:length]

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.get(key)
        return value if isinstance(value, Mapping) else {}

    def has(self, key: str) -> bool:
        """Whether the config itself names the key."""
        return self.raw.get(key) is not None


def _language_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """The mapping that describes the decoder, and whether it is nested in another."""
    for key in _NESTED:
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            return _language_part(inner)[0], True
    return config, False
