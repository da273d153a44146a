"""What one layer keeps of a sequence: keys and values, a latent, a state, or nothing. Pure data; bytes are exact."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Keeps(StrEnum):
    """The main thing a layer keeps. Everything beside it is a `SideCache` or a `RecurrentState`."""

    FULL = "full attention"
    SLIDING = "sliding window"
    CHUNKED = "chunked attention"
    LATENT = "latent attention (MLA)"
    COMPRESSED = "compressed attention"
    STATE = "recurrent state"
    SHARED = "another layer's cache"
    CROSS = "cross attention"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class SideCache:
    """A cache beside a layer's keys and values: an index, compressed entries, cross attention.

    One entry of `width` elements is kept for every `tokens_per_entry` tokens (at most for the last `window`
    tokens), or, with `fixed_entries`, that many once per sequence.
    """

    name: str
    width: int
    element_bytes: int | None = None
    """None: the KV cache's own."""
    tokens_per_entry: int = 1
    window: int | None = None
    fixed_entries: int | None = None

    def bytes_at(self, tokens: int, dtype_bytes: int) -> int:
        """Bytes for a sequence of `tokens`, without an engine's blocks."""
        if self.fixed_entries is not None:
            entries = self.fixed_entries
        else:
            entries = min(tokens, self.window or tokens) // self.tokens_per_entry
        return entries * self.width * (self.element_bytes or dtype_bytes)


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """What a recurrent layer keeps for each sequence, however long it is.

    conv state:      (conv_kernel - 1) x (conv_channels + 2 x groups x state_dim)    in the model's dtype
    recurrent state: heads x head_dim x state_dim                                    in `state_bytes` or the model's
    """

    family: str
    heads: int
    head_dim: int
    state_dim: int
    conv_channels: int = 0
    conv_kernel: int = 1
    groups: int = 0
    state_bytes: int | None = None
    """Bytes of an element of the recurrent state; None: the model's dtype."""

    def shapes(self, tp: int = 1) -> tuple[tuple[int, ...], ...]:
        """Shapes on one of `tp` ranks: heads and channels are divided; groups that do not divide are replicated."""
        groups = self.groups if self.groups % tp == 0 else self.groups + tp - self.groups
        channels = self.conv_channels + 2 * groups * self.state_dim
        shapes: list[tuple[int, ...]] = []
        if self.conv_kernel > 1:
            shapes.append((self.conv_kernel - 1, channels // tp))
        if self.heads:
            shapes.append((self.heads // tp, self.head_dim, self.state_dim))
        return tuple(shapes)

    def bytes(self, tp: int = 1, model_dtype_bytes: int = 2) -> int:
        """Bytes per sequence and layer on one rank."""
        total = 0
        for shape in self.shapes(tp):
            size = 1
            for length in shape:
                size *= length
            total += size * ((self.state_bytes or model_dtype_bytes) if len(shape) == 3 else model_dtype_bytes)
        return total


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The keys and values one layer keeps (`kv_heads` 0: none), and what else it keeps."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """Tokens a query sees, itself included; None = all. For chunked attention the chunk."""
    keeps: Keeps = Keeps.FULL
    state: RecurrentState | None = None
    side: tuple[SideCache, ...] = ()
    source: int | None = None
    """The layer whose keys and values this one reads (Keeps.SHARED)."""
    sink: bool = False
    """Attention sinks: a learned logit per head, which takes no room in the cache."""

    def bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values one token adds; side caches and states apart."""
        return self.kv_heads * (self.key_dim + self.value_dim) * dtype_bytes

    def bytes_at(self, tokens: int, dtype_bytes: int, model_dtype_bytes: int = 2) -> int:
        """Bytes a sequence of `tokens` keeps here, without an engine's blocks."""
        kept = min(tokens, self.window or tokens) * self.bytes_per_token(dtype_bytes)
        beside = sum(cache.bytes_at(tokens, dtype_bytes) for cache in self.side)
        state = self.state.bytes(model_dtype_bytes=model_dtype_bytes) if self.state and tokens else 0
        return kept + beside + state


NOTHING = LayerKV(0, 0, 0, keeps=Keeps.NOTHING)
