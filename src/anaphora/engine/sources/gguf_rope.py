"""Scaled rotary embeddings of a GGUF file, which transformers' reader drops without a word."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from anaphora.errors import UnsupportedModel
from anaphora.geometry.gguf_header import GgufHeader

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The same in every release from Llama 3.1 on; only the factor differs (8, 32)."""
_PLAIN = ("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe")
"""Architectures whose `rope.scaling.*` means one scaling for all layers."""


def rope_scaling(file: Path, header: GgufHeader) -> dict[str, Any] | None:
    """What belongs into the config's `rope_parameters` beside rope_theta, or None without scaling.

    Raises UnsupportedModel for a scaling that cannot be expressed: better than text that goes wrong with length.
    """
    prefix = f"{header.architecture}.rope."
    kind = header.metadata.get(f"{prefix}scaling.type", "none")
    if header.architecture == "gpt-oss":  # the one architecture whose scaling transformers reads
        return None
    if "rope_freqs.weight" in header.tensor_names:
        theta = float(header.metadata.get(f"{prefix}freq_base", 10000.0))
        return _llama3(_factors(file), theta)
    if kind == "none" and not any(name.startswith("rope_factors") for name in header.tensor_names):
        return None
    factor = header.metadata.get(f"{prefix}scaling.factor")
    if header.architecture in _PLAIN and kind in ("linear", "yarn") and factor:
        scaling = {"rope_type": kind, "factor": float(factor)}
        if original := header.metadata.get(f"{prefix}scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = int(original)
        return scaling
    raise UnsupportedModel("its scaling of rotary embeddings cannot be read from a GGUF file.")


def _factors(file: Path) -> list[float]:
    import gguf

    tensors = gguf.GGUFReader(str(file)).tensors
    return [float(value) for tensor in tensors if tensor.name == "rope_freqs.weight" for value in tensor.data]


def _llama3(factors: list[float], theta: float) -> dict[str, Any]:
    """The parameters that reproduce `factors`, what each of the head_dim / 2 frequencies is divided by."""
    parameters = {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
    low, high, original = _LLAMA3.values()
    for i, found in enumerate(factors):
        turns = original * theta ** (-i / len(factors)) / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        if not math.isclose(found, 1 / ((1 - smooth) / max(factors) + smooth), rel_tol=1e-3):
            raise UnsupportedModel("its rotary frequencies follow no known rule.")
    return parameters
