"""The sum to do before touching any flag: 2 x layers x KV heads x head_dim x tokens x batch x bytes of a number."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from anaphora.errors import ConfigError
from anaphora.geometry.units import human_bytes


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """What a cache takes."""

    bytes_per_token: int
    """Of one sequence."""
    total_bytes: int

    @property
    def per_token(self) -> str:
        """Such as '56 KiB'."""
        return human_bytes(self.bytes_per_token)

    @property
    def total(self) -> str:
        """Such as '448 MiB'."""
        return human_bytes(self.total_bytes)


def kv_cache_size(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    sequence_length: int,
    dtype_bytes: float = 2,
    batch_size: int = 1,
) -> KVCacheSize:
    """The formula, with the model's KV heads (not its query heads). `dtype_bytes` may be a fraction: 0.5 for 4 bits.

    Raises ConfigError for anything that is not positive, or when the bytes come out broken.
    """
    whole = {
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "sequence_length": sequence_length,
        "batch_size": batch_size,
    }
    for name, value in whole.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; give a positive whole number")
    if not dtype_bytes > 0:
        raise ConfigError(f"dtype_bytes is {dtype_bytes!r}; give 2 for bf16, 1 for fp8, 0.5 for 4 bits")
    per_token = 2 * num_layers * num_kv_heads * head_dim * Fraction(dtype_bytes)
    if per_token.denominator != 1:
        raise ConfigError(f"{dtype_bytes} bytes a number do not make whole bytes a token for head_dim {head_dim}")
    return KVCacheSize(int(per_token), int(per_token) * sequence_length * batch_size)
