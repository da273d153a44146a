"""Bytes of the weights, by dtype and quantisation: the checkpoint's own, or one asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anaphora.errors import ConfigError
from anaphora.geometry.fields import Fields
from anaphora.geometry.parameters import Parameters

_FP16_SCALE = 16
_DTYPE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float": 32, "half": 16}


def _grouped(bits: int, group: int, scale: int, zero: int = 0) -> float:
    """Bits of one weight with its share of a group's scale and zero point."""
    return bits + (scale + zero) / group


SCHEMES: dict[str, float] = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "fp8": 8,
    "int8": 8,
    "fp8-block": _grouped(8, 128 * 128, 32),
    "awq": _grouped(4, 128, _FP16_SCALE, 4),
    "gptq": _grouped(4, 128, _FP16_SCALE, 4),
    "int4": _grouped(4, 128, _FP16_SCALE),
    "nvfp4": _grouped(4, 16, 8),
    "mxfp4": _grouped(4, 32, 8),
}
"""Bits of one weight of a quantised matrix, scales included. Embeddings, head and norms stay in the model's dtype."""


GGUF_FILES: dict[str, float] = {
    "q2_k": 3.16,
    "q3_k_m": 4.0,
    "iq4_xs": 4.46,
    "q4_0": 4.66,
    "q4_k_m": 4.89,
    "q5_k_m": 5.7,
    "q6_k": 6.56,
    "q8_0": 8.5,
}
"""Bits of a weight over a whole file, embeddings included, as llama.cpp's quantize tool states for Llama-3.1-8B. Other
models differ by a few per cent: the file itself says it exactly (ModelGeometry.from_gguf)."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint stores its matrices: bits of one weight by place."""

    name: str
    attention: float
    dense: float
    experts: float
    rest: float = 16
    """Embeddings, head, norms, vision."""

    def bytes_of(self, parameters: Parameters) -> int:
        """Bytes of all weights, rounded up."""
        bits = (
            parameters.attention * self.attention
            + parameters.dense * self.dense
            + parameters.experts * self.experts
            + (parameters.embedding + parameters.other + parameters.vision) * self.rest
        )
        return -int(-bits // 8)


def scheme(name: str) -> Quantization:
    """A scheme by name. Raises ConfigError."""
    of_file = GGUF_FILES.get(name.lower())
    if of_file is not None:
        return Quantization(name.lower(), of_file, of_file, of_file, rest=of_file)
    bits = SCHEMES.get(name)
    if bits is None:
        raise ConfigError(f"quantization {name!r} is not known; choose one of {', '.join((*SCHEMES, *GGUF_FILES))}")
    return Quantization(name, bits, bits, bits, rest=32 if name == "float32" else 16)


def checkpoint_quantization(fields: Fields) -> Quantization:
    """What the config says of its own checkpoint: dtype and `quantization_config`."""
    dtype = str(fields.whole.get("dtype") or fields.whole.get("torch_dtype") or _inner_dtype(fields) or "bfloat16")
    dtype = dtype.removeprefix("torch.")
    plain = _DTYPE_BITS.get(dtype, 16)
    config = _quantization_config(fields)
    if not config:
        return Quantization(dtype, plain, plain, plain, rest=plain)
    kept = " ".join(str(name) for name in _ignored(config))
    method = str(config.get("quant_method") or config.get("quant_algo") or "quantised").lower()

    def bits(place: str, *names: str) -> float:
        if any(name in kept for name in names):
            return plain
        return _bits(config, method, place)

    attention = bits("attn", "self_attn*", "*.self_attn", "self_attn.*", "self_attn\\\\.", "*.attn")
    dense = bits("mlp", "shared_experts", "mlp\\\\.(gate", "mlp\\.(gate")
    experts = bits("experts", "mlp.experts")
    return Quantization(method, attention, dense, experts, rest=plain)


def checkpoint_kv_dtype(fields: Fields) -> str | None:
    """ "fp8" when the checkpoint brings scales for an fp8 KV cache, which `auto` then means."""
    config = _quantization_config(fields)
    cache = config.get("kv_cache_scheme")
    algorithm = str(config.get("kv_cache_quant_algo") or "").lower()
    if isinstance(cache, Mapping) and cache.get("num_bits") == 8 and cache.get("type") == "float":
        return "fp8"
    return algorithm or None


def _quantization_config(fields: Fields) -> Mapping[str, Any]:
    found = fields.whole.get("quantization_config") or fields.raw.get("quantization_config")
    found = found or fields.whole.get("compression_config")
    return found if isinstance(found, Mapping) else {}


def _inner_dtype(fields: Fields) -> Any:
    return fields.raw.get("dtype") or fields.raw.get("torch_dtype")


def _ignored(config: Mapping[str, Any]) -> list[Any]:
    found = config.get("ignore") or config.get("modules_to_not_convert") or config.get("exclude_modules") or []
    return list(found) if isinstance(found, (list, tuple)) else []


def _bits(config: Mapping[str, Any], method: str, place: str) -> float:
    """Bits of a weight in attention, dense parts or experts, by the method's own keys."""
    groups = config.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        return _bits_of_group(groups, place)
    if method in ("awq", "gptq"):
        bits, group = int(config.get("bits") or config.get("w_bit") or 4), int(config.get("group_size") or 128)
        return _grouped(bits, group if group > 0 else 1 << 20, _FP16_SCALE, bits)
    if method == "fp8" and config.get("weight_block_size"):
        return SCHEMES["fp8-block"]
    if method == "bitsandbytes":
        return 4.5 if config.get("load_in_4bit") else 8
    algorithm = str(config.get("quant_algo") or method).lower()
    known = {"mxfp4": "mxfp4", "nvfp4": "nvfp4", "fp8": "fp8", "fbgemm_fp8": "fp8", "int8": "int8", "modelopt": "fp8"}
    return SCHEMES[known.get(algorithm, "fp8")]


def _bits_of_group(groups: Mapping[str, Any], place: str) -> float:
    """compressed-tensors and ModelOpt: the group whose targets name the place, else the narrowest."""
    found: list[float] = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        bits, size = int(weights.get("num_bits", 8)), weights.get("group_size")
        scale = 8 if weights.get("type") == "float" else _FP16_SCALE
        value = _grouped(bits, int(size), scale) if size and int(size) > 0 else float(bits)
        if any(place in str(target) for target in group.get("targets", ())):
            return value
        found.append(value)
    return min(found, default=16.0)
