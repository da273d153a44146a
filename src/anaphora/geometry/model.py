"""ModelGeometry: which layers keep keys and values, and how many bytes one token takes.

Source of the formula: bytes = 2 x layers x kv_heads x head_dim x tokens x dtype_bytes, summed over layers
that keep KV, with the *KV* heads of the model's own config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from anaphora.errors import CorruptModel
from anaphora.geometry.catalog import find_model
from anaphora.geometry.families import is_known
from anaphora.geometry.fields import Fields, load_config
from anaphora.geometry.layers import Keeps, LayerKV, RecurrentState, SideCache
from anaphora.geometry.parameters import Parameters, count_parameters
from anaphora.geometry.reading import read_layers
from anaphora.geometry.safetensors import StoredWeights, read_folder
from anaphora.geometry.weights import Quantization, checkpoint_kv_dtype, checkpoint_quantization, scheme

__all__ = ["Keeps", "LayerGroup", "LayerKV", "ModelGeometry", "RecurrentState", "SideCache"]

_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
    "n_ctx",
)
_ALREADY_SCALED = {"default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "mrope", "proportional"}
_NO_SCALING = {"default", "mrope", "proportional"}
"""Kinds of rotary positions that say nothing of the length."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same."""

    layer: LayerKV
    indices: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.indices)


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
    max_position_from: str = field(default="context length of its header", compare=False)
    """The key it comes from, and what scales it."""
    trained_position: int | None = None
    """LongRoPE: the shorter length it was trained on, which engines serve by default."""
    parameters: Parameters | None = None
    """None where the config lacks what a count needs."""
    quantization: Quantization | None = None
    """The checkpoint's own."""
    checkpoint_kv_dtype: str | None = None
    """The dtype a KV cache of `auto` takes because the checkpoint brings scales for it."""
    stored_weight_bytes: int | None = None
    """Bytes of the tensors, read from the checkpoint's own headers."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """Keys the config leaves out and its class fills in."""
    assumed_full_attention: bool = False
    """The type is not known and every layer was sized as full attention because the user said so."""

    def bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """Bytes one token adds in all layers while it is inside every window (rounded up where entries span tokens)."""
        total = Fraction(sum(layer.bytes_per_token(dtype_bytes) for layer in self.layers))
        for layer in self.layers:
            for cache in layer.side:
                if cache.fixed_entries is None:
                    total += Fraction(cache.width * (cache.element_bytes or dtype_bytes), cache.tokens_per_entry)
        return -(-total.numerator // total.denominator)

    def sequence_bytes(self, tokens: int, dtype_bytes: int = 2, model_dtype_bytes: int = 2) -> int:
        """Bytes one sequence of `tokens` keeps: windows and states counted, an engine's blocks not."""
        return sum(layer.bytes_at(tokens, dtype_bytes, model_dtype_bytes) for layer in self.layers)

    def state_bytes(self, model_dtype_bytes: int = 2) -> int:
        """Bytes of recurrent state one sequence keeps, however long it is."""
        return sum(layer.state.bytes(model_dtype_bytes=model_dtype_bytes) for layer in self.layers if layer.state)

    def weight_bytes(self, quantization: str | None = None) -> int | None:
        """Bytes of the weights: the checkpoint's own (measured where headers were read), or in another scheme.

        None where the config lacks what a count needs. Raises ConfigError for an unknown scheme.
        """
        if quantization is None and self.stored_weight_bytes is not None:
            return self.stored_weight_bytes
        chosen = self.quantization if quantization is None else scheme(quantization)
        return None if self.parameters is None or chosen is None else chosen.bytes_of(self.parameters)

    def groups(self) -> tuple[LayerGroup, ...]:
        """Layers that keep the same, in the order of their first layer."""
        found: dict[LayerKV, list[int]] = {}
        for i, layer in enumerate(self.layers):
            found.setdefault(layer, []).append(i)
        return tuple(LayerGroup(layer, tuple(indices)) for layer, indices in found.items())

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | str | Path, *, assume_full_attention: bool = False
    ) -> ModelGeometry:
        """Read a config.json (its mapping, its path, or its folder).

        Of a folder the headers of its safetensors files are read too.
        Raises UnsupportedModel (by name, with the reason), CorruptModel (with the field) and ModelNotFound.
        """
        fields = Fields(load_config(config))
        folder = None if isinstance(config, Mapping) else Path(config)
        stored = read_folder(folder) if folder is not None and folder.is_dir() else None
        try:
            return cls._of(fields, stored, assume_full_attention)
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            # A list where a number belongs, text in a list of numbers: each key's own check names the usual ones.
            raise CorruptModel(
                f"config.json of {fields.architecture} holds a value of a type that its key cannot have ({error}). "
                "Fetch it again"
            ) from error

    @classmethod
    def _of(cls, fields: Fields, stored: StoredWeights | None, assume_full_attention: bool) -> ModelGeometry:
        layers = read_layers(fields, assume_full_attention=assume_full_attention)
        has_attention = any(layer.kv_heads or layer.side for layer in layers)
        limit, named, trained = _lengths(fields)
        return cls(
            architecture=fields.architecture,
            model_type=fields.model_type,
            layers=layers,
            query_heads=fields.need("num_attention_heads") if has_attention else 0,
            hidden_size=fields.need("hidden_size"),
            vocab_size=fields.need("vocab_size"),
            max_position=limit,
            max_position_from=named,
            trained_position=trained,
            parameters=_count(fields, layers),
            quantization=checkpoint_quantization(fields),
            checkpoint_kv_dtype=checkpoint_kv_dtype(fields),
            stored_weight_bytes=stored.bytes if stored else None,
            assumed=dict(fields.assumed),
            assumed_full_attention=assume_full_attention and not is_known(fields.model_type),
        )

    @classmethod
    def from_gguf(cls, path: str | Path) -> ModelGeometry:
        """Read the header of a GGUF file, of all its parts when it is split; no tensor is read.

        Raises ModelNotFound, CorruptModel and UnsupportedModel, each with the file's name.
        """
        # imported here: every command reads a geometry, few read one from a GGUF file
        from anaphora.geometry.gguf import bits_of, gguf_layers, gguf_parameters, main_type, read_gguf

        meta, tensors = read_gguf(Path(path))
        layers = gguf_layers(meta)
        kind = main_type(tensors)
        return cls(
            architecture=meta.architecture,
            model_type=meta.architecture,
            layers=layers,
            query_heads=max(meta.by_layer("attention.head_count", len(layers), 0)),
            hidden_size=meta.need("embedding_length"),
            vocab_size=meta.vocab_size,
            max_position=meta.get("context_length"),
            parameters=gguf_parameters(meta, tensors),
            quantization=Quantization(kind, *bits_of(kind)),
            stored_weight_bytes=sum(tensor.bytes for tensor in tensors),
        )

    @classmethod
    def from_hub(cls, model_id: str, *, revision: str = "main", assume_full_attention: bool = False) -> ModelGeometry:
        """A model of the Hugging Face Hub, by its config and the headers of its weights (HTTP ranges).

        Raises what `from_config` does, and DownloadError.
        """
        from anaphora.geometry.hub import fetch  # the network only here

        config, stored = fetch(model_id, revision)
        geometry = cls.from_config(config, assume_full_attention=assume_full_attention)
        return replace(geometry, stored_weight_bytes=stored.bytes if stored else None)

    @classmethod
    def from_catalog(cls, name: str) -> ModelGeometry:
        """A model of the catalogue, offline. Raises ModelNotFound with the nearest names."""
        return cls.from_config(find_model(name).config)


def _count(fields: Fields, layers: tuple[LayerKV, ...]) -> Parameters | None:
    """The parameters, None when a key for them is missing: the cache can be sized all the same."""
    try:
        return count_parameters(fields, layers)
    except CorruptModel:
        return None


def _lengths(fields: Fields) -> tuple[int | None, str, int | None]:
    """(context limit, where it comes from, shorter length LongRoPE was trained on), as vLLM derives them."""
    named = [key for key in _LENGTH_KEYS if fields.has(key)] or _LENGTH_KEYS  # n_positions beats a class default
    lengths = {key: value for key in named if isinstance(value := fields.get(key), int) and value > 0}
    source = min(lengths, key=lambda key: lengths[key], default="")
    limit = lengths.get(source)
    own = fields.integer("model_max_length")
    if own is not None:
        limit, source = own, "model_max_length"
    rope = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    parts = [value for value in rope.values() if isinstance(value, Mapping)] or [rope]
    kinds = {str(part.get("rope_type") or part.get("type") or "default") for part in parts}
    factor = next((value for part in parts if isinstance(value := part.get("factor"), (int, float)) and value > 0), 1)
    scaled = ", ".join(sorted(kinds - _NO_SCALING))
    if limit is not None and not kinds & _ALREADY_SCALED and "gemma3" not in fields.model_type:
        limit, source = int(limit * factor), f"{source} {limit} x the factor {factor:g} of its {scaled} rope scaling"
    elif scaled:
        source = f"{source}, which holds its {scaled} rope scaling already"
    trained = None
    if kinds & {"longrope", "su"}:
        trained = fields.integer("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return limit, source, trained
