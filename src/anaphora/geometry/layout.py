"""CacheLayout: which layers share a block. What a block weighs: geometry/kv_dtype.py.

A block holds `slots` layers' keys and values for `block_size` tokens. Layers with the same window form a
kind; each kind is cut into groups of `slots` layers, and every group of a request has its own block table.
All groups draw from one pool, because every block weighs the same (as vLLM's hybrid groups do).

    one kind (Llama):   30 full layers           -> 1 group,  slots = 30
    two kinds (Gemma 2): 13 full + 13 sliding    -> 2 groups, slots = 13
    (Gemma 3 1B)          4 full + 22 sliding    -> 7 groups, slots = 4 (2 slots of the last stay empty)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from anaphora.errors import UnsupportedModel
from anaphora.geometry.layers import Keeps, LayerKV
from anaphora.geometry.model import ModelGeometry

_MAX_GROUPS = 8
_REFUSED = {
    Keeps.LATENT: "its attention keeps a latent (MLA), not keys and values",
    Keeps.COMPRESSED: "its attention keeps compressed latents, not keys and values",
    Keeps.STATE: "some of its layers keep a recurrent state instead of keys and values",
    Keeps.SHARED: "some of its layers share keys and values across layers",
    Keeps.CHUNKED: "some of its layers attend within chunks",
    Keeps.CROSS: "some of its layers attend to an image or an encoder",
    Keeps.NOTHING: "some of its layers have no attention",
}


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Where each layer's keys and values lie inside blocks."""

    groups: tuple[CacheGroup, ...]
    slots: int
    kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int

    def place(self, layer: int) -> tuple[int, int]:
        """(group, slot) of a layer."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise IndexError(f"layer {layer} keeps no KV")

    def blocks_for(self, num_tokens: int, in_flight: int) -> int:
        """Most blocks one sequence of `num_tokens` holds at a time, with `in_flight` tokens computed per step.

        A windowed group keeps the window's tokens before the step's first, the step's own, and one block
        more because neither end falls on a block border.
        """
        total = 0
        for group in self.groups:
            full = -(-num_tokens // self.block_size)
            if group.window is not None:
                kept = group.window - 1 + in_flight
                full = min(full, -(-kept // self.block_size) + 1)
            total += full
        return total

    @classmethod
    def of(cls, geometry: ModelGeometry, block_size: int) -> CacheLayout:
        """Group the layers so that the fewest slots stay empty, then into the fewest groups.

        Raises UnsupportedModel when a layer keeps anything but plain keys and values, or when layers differ in heads
        or widths (blocks would not weigh the same).
        """
        reason = next(filter(None, map(_why_not, geometry.layers)), None)
        if reason:
            raise UnsupportedModel(
                f"{geometry.architecture} cannot run here: {reason}. Serve it with vLLM or llama.cpp, "
                "or choose a decoder whose every layer keeps plain keys and values"
            )
        shapes = {(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in geometry.layers}
        if len(shapes) != 1:
            raise UnsupportedModel(
                f"{geometry.architecture} cannot run here: its layers differ in KV heads or head_dim "
                f"({sorted(shapes)}). Serve it with vLLM"
            )
        kinds = Counter(layer.window for layer in geometry.layers)

        def cost(slots: int) -> tuple[bool, int, int]:
            groups = sum(-(-n // slots) for n in kinds.values())
            return groups > _MAX_GROUPS, groups * slots, groups

        slots = min(range(1, max(kinds.values()) + 1), key=cost)
        groups: list[CacheGroup] = []
        for window in sorted(kinds, key=lambda w: (w is not None, w or 0)):  # full attention first
            layers = [i for i, layer in enumerate(geometry.layers) if layer.window == window]
            groups += [CacheGroup(window, tuple(layers[i : i + slots])) for i in range(0, len(layers), slots)]
        kv_heads, key_dim, value_dim = shapes.pop()
        return cls(tuple(groups), slots, kv_heads, key_dim, value_dim, block_size)


def _why_not(layer: LayerKV) -> str | None:
    """Why this engine's blocks cannot hold what a layer keeps; None when they can."""
    if layer.state is not None:
        return _REFUSED[Keeps.STATE]
    if layer.side and layer.keeps is not Keeps.CROSS:
        cross = any(cache.fixed_entries is not None for cache in layer.side)
        return "it is an encoder-decoder model" if cross else _REFUSED.get(layer.keeps, "its layers keep an index too")
    return _REFUSED.get(layer.keeps)
