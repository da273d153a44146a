"""What `transformers serve --continuous-batching` makes of its memory. Read from transformers 5.24.

    page      256 tokens of one layer
    block     the pages of all layers of one kind (full, sliding) for 256 tokens
    sector    the least common multiple of the kinds' blocks and 128 bytes; kinds draw sectors from one pool, two of
              them are never given out

A sector also costs the buffers its tokens are read into, one layer's keys and values and their indices, so fewer fit
than the cache bytes alone say. A sliding layer keeps its window, up to a page. Prefixes are shared page by page, only
where all layers are full attention.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from anaphora.errors import ConfigError, UnsupportedModel
from anaphora.geometry.model import Keeps, ModelGeometry
from anaphora.planning.protocol import Capacity, EngineSettings, GroupCapacity
from anaphora.planning.search import largest

PAGE = 256
DEFAULT_BATCH = 8192
_ALIGNMENT = 128
_TRASH = 2
_INDEX = 8
_IO_SETS = 2
"""Asynchronous batching keeps two sets of index tensors."""


class TransformersMemory:
    """The paged cache of continuous batching, read through flash attention."""

    name = "transformers"

    def capacity(self, geometry: ModelGeometry, settings: EngineSettings, available_bytes: int) -> Capacity:
        """Sectors, tokens and concurrency for `available_bytes`. Raises ConfigError, UnsupportedModel."""
        kinds = _kinds(geometry, settings)
        page_bytes = self.page_bytes(geometry, settings)
        page = settings.block_size or PAGE
        sector = lcm(*(layers * page_bytes for layers in kinds.values()), _ALIGNMENT)
        cost = sector + self.reading_bytes(geometry, settings, len(kinds), sector // page_bytes // min(kinds.values()))
        sectors = max(0, available_bytes - _TRASH * sector) // cost
        groups = []
        held = 0
        for window, layers in kinds.items():
            kept = settings.max_model_len if window is None else min(window, settings.max_model_len)
            per_sector = sector // (layers * page_bytes)
            blocks = -(-kept // page)
            need = -(-blocks // per_sector)
            held += need
            span = page * per_sector
            groups.append(GroupCapacity("full" if window is None else "sliding", layers, span, window, need))
        shares = list(kinds) == [None] and settings.enable_prefix_caching is not False
        concurrency = sectors / held
        return Capacity(
            available_bytes=available_bytes,
            block_bytes=cost,
            num_blocks=sectors,
            block_size=page,
            groups=tuple(groups),
            blocks_per_request=held,
            max_concurrency=concurrency,
            tokens=int(concurrency * settings.max_model_len),
            tokens_older=int(concurrency * settings.max_model_len),
            reuse_step=page if shares else 0,
            kept_back=0,
        )

    def page_bytes(self, geometry: ModelGeometry, settings: EngineSettings) -> int:
        """Bytes of one layer's keys and values for a page, on one rank."""
        layer = next(layer for layer in geometry.layers if layer.kv_heads)
        heads = layer.kv_heads // settings.tensor_parallel_size
        page = settings.block_size or PAGE
        return heads * (layer.key_dim + layer.value_dim) * settings.model_dtype_bytes * page

    def reading_bytes(self, geometry: ModelGeometry, settings: EngineSettings, kinds: int, pages: int) -> int:
        """Bytes of the buffers that `pages` pages of tokens are read into."""
        page = settings.block_size or PAGE
        return pages * (self.page_bytes(geometry, settings) + page * _IO_SETS * kinds * _INDEX)

    def longest_context(self, geometry: ModelGeometry, settings: EngineSettings, available_bytes: int) -> int:
        """The longest request that fits, at most `settings.max_model_len`."""

        def fits(length: int) -> bool:
            at = replace(settings, max_model_len=length)
            return self.capacity(geometry, at, available_bytes).max_concurrency >= 1

        return largest(settings.max_model_len, fits)


def _kinds(geometry: ModelGeometry, settings: EngineSettings) -> dict[int | None, int]:
    """Layers by window, in the order of their first layer."""
    if settings.kv_cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise ConfigError(
            f"kv_cache_dtype {settings.kv_cache_dtype!r}: transformers' continuous batching keeps KV in the model's "
            "dtype. Plan vLLM or SGLang for fp8, llama.cpp for q8_0"
        )
    found: dict[int | None, int] = {}
    for layer in geometry.layers:
        if layer.keeps not in (Keeps.FULL, Keeps.SLIDING) or layer.state or layer.side:
            raise UnsupportedModel(
                f"{geometry.architecture}: continuous batching of transformers has full and sliding attention only, "
                f"and this model has {layer.keeps}. Plan vLLM or llama.cpp"
            )
        found[layer.window] = found.get(layer.window, 0) + 1
    heads = {layer.kv_heads for layer in geometry.layers}
    if any(n % settings.tensor_parallel_size for n in heads):
        raise ConfigError(
            f"{geometry.architecture} has {min(heads)} KV heads, which tensor parallelism over "
            f"{settings.tensor_parallel_size} does not divide; transformers needs that"
        )
    return found
