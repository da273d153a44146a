"""GGUF metadata -> layers and weights, from the header alone. Keys: llama.cpp's gguf-py/gguf/constants.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anaphora.errors import CorruptModel, ModelNotFound, UnsupportedModel
from anaphora.geometry.gguf_header import GGML_TYPES, GgufHeader, GgufTensor, read_gguf_header
from anaphora.geometry.layers import NOTHING, Keeps, LayerKV, RecurrentState
from anaphora.geometry.parameters import Parameters

_SPLIT_NAME = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")
_WINDOWS: dict[str, str] = {
    "afmoe": "sssf",
    "cohere2": "sssf",
    "exaone4": "sssf",
    "gemma2": "sf",
    "gemma3": "sssssf",
    "gemma3n": "ssssf",
    "gemma4": "sssssf",
    "gpt-oss": "sf",
    "llama4": "cccf",
    "olmo2": "sssf",
    "phi3": "s",
    "smallthinker": "fsss",
}
"""Architectures whose sliding layers llama.cpp keeps in a smaller cache; elsewhere it keeps every token."""
_LLAMA4_CHUNK = 8192
_LINEAR = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
"""Gated DeltaNet in all but every n-th layer."""
_PLACES: tuple[tuple[str, str], ...] = (
    (r"^(token_embd|output|position_embd|per_layer_token_embd)\.weight$", "embedding"),
    (r"_exps\.weight$", "experts"),
    (r"\.ffn_(gate|up|down)(_shexp)?\.weight$", "dense"),
    (r"^(v|mm)\.", "vision"),
    (r"\.(attn_|ssm_|shortconv|time_mix)\w*\.weight$", "attention"),
)
"""Where a tensor belongs, by its name; what matches nothing is small."""


class Metadata:
    """The keys of one architecture, with errors that name them."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self.path, self.architecture, self._all = path, header.architecture, header.metadata

    def get(self, key: str, default: Any = None) -> Any:
        return self._all.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise CorruptModel(
                f"{self.path}: {self.architecture}.{key} is {value!r}; it must be a positive whole number. "
                "Convert the model again with a current llama.cpp"
            )
        return value

    def by_layer(self, key: str, layers: int, default: int) -> list[int]:
        """One number for all layers, or a list."""
        value = self.get(key, default)
        if isinstance(value, (list, tuple)):
            if len(value) < layers:
                raise CorruptModel(f"{self.path}: {key} names {len(value)} layers, the model has {layers}")
            return [int(item) for item in value[:layers]]
        return [int(value)] * layers

    @property
    def vocab_size(self) -> int:
        tokens = self._all.get("tokenizer.ggml.tokens")
        return int(self.get("vocab_size") or (len(tokens) if isinstance(tokens, Sequence) else 0))


def read_gguf(path: Path) -> tuple[Metadata, list[GgufTensor]]:
    """The metadata of a model and the tensors of all its parts.

    Raises ModelNotFound, CorruptModel and UnsupportedModel.
    """
    if not path.is_file():
        raise ModelNotFound(f"{path} is not there; give the path of a .gguf file")
    parts = _parts(path)
    headers = [read_gguf_header(part, part_of_split=len(parts) > 1) for part in parts]
    if not headers[0].architecture:
        raise CorruptModel(f"{parts[0]} names no architecture. Download the first part again.")
    tensors = [tensor for header in headers for tensor in header.tensors]
    promised = headers[0].metadata.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise CorruptModel(
            f"{path}: its parts hold {len(tensors)} tensors, {promised} are promised. Download it again."
        )
    return Metadata(parts[0], headers[0]), tensors


def _parts(path: Path) -> list[Path]:
    """All parts of a split file, by the names llama-gguf-split gives. Raises ModelNotFound for a missing one."""
    match = _SPLIT_NAME.match(path.name)
    if match is None:
        return [path]
    stem, _, total = match.groups()
    parts = [path.with_name(f"{stem}-{i:05d}-of-{total}.gguf") for i in range(1, int(total) + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelNotFound(f"{path} is one of {int(total)} parts; missing: {', '.join(missing)}. Download them too")
    return parts


def gguf_layers(meta: Metadata) -> tuple[LayerKV, ...]:
    """What each layer keeps, as llama.cpp builds it. Raises CorruptModel, UnsupportedModel."""
    count = meta.need("block_count") - int(meta.get("nextn_predict_layers", 0))
    if (
        meta.get("ssm.state_size") is None
        and meta.get("attention.head_count") is None
        and not meta.get("shortconv.l_cache")
    ):
        raise UnsupportedModel(
            f"{meta.path} (architecture {meta.architecture!r}) names neither attention heads nor a state; "
            "its cache cannot be sized from the header"
        )
    if meta.get("attention.kv_lora_rank"):
        width = meta.need("attention.kv_lora_rank") + int(meta.get("rope.dimension_count", 0))
        layers = [LayerKV(1, width, 0, keeps=Keeps.LATENT)] * count
    else:
        layers = _attention_layers(meta, count)
    layers = _with_states(meta, layers)
    shared = int(meta.get("attention.shared_kv_layers", 0))
    if shared:
        last = {layer.keeps: i for i, layer in enumerate(layers[: count - shared])}
        layers[count - shared :] = [
            LayerKV(0, 0, 0, keeps=Keeps.SHARED, source=last.get(layer.keeps)) for layer in layers[count - shared :]
        ]
    return tuple(layers)


def _attention_layers(meta: Metadata, count: int) -> list[LayerKV]:
    heads = meta.by_layer("attention.head_count", count, 0)
    kv_heads = meta.by_layer("attention.head_count_kv", count, max(heads))
    width = meta.need("embedding_length") // max(1, max(heads))
    key, value = int(meta.get("attention.key_length", width)), int(meta.get("attention.value_length", width))
    local_key, local_value = (
        int(meta.get("attention.key_length_swa", key)),
        int(meta.get("attention.value_length_swa", value)),
    )
    kinds = _kinds(meta, count)
    window = meta.get("attention.sliding_window") or 0
    makers: dict[str, Callable[[int], LayerKV]] = {
        "f": lambda n: LayerKV(n, key, value),
        "s": lambda n: LayerKV(n, local_key, local_value, int(window), Keeps.SLIDING),
        "c": lambda n: LayerKV(n, key, value, int(meta.get("attention.chunk_size", _LLAMA4_CHUNK)), Keeps.CHUNKED),
    }
    return [
        makers[kind](n) if n and heads[i] else NOTHING for i, (kind, n) in enumerate(zip(kinds, kv_heads, strict=True))
    ]


def _kinds(meta: Metadata, count: int) -> str:
    """One letter per layer: f full, s sliding, c chunked."""
    pattern: Any = meta.get("attention.sliding_window_pattern")
    letters = _WINDOWS.get(meta.architecture)
    if letters is None or (letters != "cccf" and not meta.get("attention.sliding_window")):
        return "f" * count
    if isinstance(pattern, (list, tuple)):
        return "".join("s" if flag else "f" for flag in pattern[:count])
    if isinstance(pattern, int) and pattern > 0:
        letters = letters[0] * (pattern - 1) + "f"
    return "".join(letters[i % len(letters)] for i in range(count))


def _with_states(meta: Metadata, layers: list[LayerKV]) -> list[LayerKV]:
    """Recurrent layers: all of a Mamba, those without KV heads in a hybrid, all but every n-th of a linear one."""
    cache = meta.get("shortconv.l_cache")
    if cache:
        conv = RecurrentState("short_conv", 0, 0, 0, meta.need("embedding_length"), int(cache), state_bytes=4)
        return [layer if layer.kv_heads else LayerKV(0, 0, 0, keeps=Keeps.STATE, state=conv) for layer in layers]
    if meta.get("ssm.state_size") is None:
        return layers
    inner, dim = meta.need("ssm.inner_size"), meta.need("ssm.state_size")
    groups, kernel = int(meta.get("ssm.group_count", 0)), meta.need("ssm.conv_kernel")
    state = RecurrentState("mamba", inner, 1, dim, inner, kernel, groups, state_bytes=4)
    recurrent = LayerKV(0, 0, 0, keeps=Keeps.STATE, state=state)
    every = int(meta.get("full_attention_interval", _LINEAR.get(meta.architecture, 0)))
    if every:
        return [layer if (i + 1) % every == 0 else recurrent for i, layer in enumerate(layers)]
    if meta.architecture == "falcon-h1":
        return [replace(layer, state=state) for layer in layers]
    without = meta.by_layer("feed_forward_length", len(layers), 0)  # Nemotron-H: a layer is one thing only
    single = meta.architecture.startswith("nemotron_h")
    return [layer if layer.kv_heads or (single and without[i]) else recurrent for i, layer in enumerate(layers)]


def gguf_parameters(meta: Metadata, tensors: Sequence[GgufTensor]) -> Parameters:
    """The weights by place, from the tensor table."""
    counted: dict[str, int] = {}
    for tensor in tensors:
        place = next((name for pattern, name in _PLACES if re.search(pattern, tensor.name)), "other")
        counted[place] = counted.get(place, 0) + tensor.elements
    experts, used = int(meta.get("expert_count", 0)), int(meta.get("expert_used_count", 0))
    active = counted.get("experts", 0) * used // experts if experts else 0
    return Parameters(**{"embedding": 0, **counted}, active_experts=active)


def main_type(tensors: Sequence[GgufTensor]) -> str:
    """The type that most bytes have: the file's quantisation in one word."""
    totals: Mapping[str, int] = {
        kind: sum(t.bytes for t in tensors if t.type == kind) for kind in {t.type for t in tensors}
    }
    return max(totals, key=lambda kind: totals[kind], default="F32")


def bits_of(kind: str) -> tuple[float, float, float]:
    """Bits of a weight of a ggml type, for matrices everywhere."""
    bits = next(8 * size / count for name, count, size in GGML_TYPES.values() if name == kind)
    return bits, bits, bits
