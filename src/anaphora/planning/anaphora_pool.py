"""Anaphora's own pool, as `anaphora serve` prints it: blocks of one weight for all groups of layers."""

from __future__ import annotations

from anaphora.errors import ConfigError
from anaphora.geometry.kv_dtype import BlockMap, KVDtype, kv_dtype
from anaphora.geometry.layout import CacheLayout
from anaphora.geometry.model import ModelGeometry
from anaphora.planning.protocol import Capacity, EngineSettings, GroupCapacity
from anaphora.planning.search import largest

DEFAULT_BLOCK = 16

NATIVE_FAMILIES = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
        *("phi3", "granite", "olmo2", "smollm3"),
    }
)
"""model_types that the native kernels run: those of the engine's compact decoder (a test compares them)."""

_NATIVE_STEP = 16
"""Tokens of a block that a native kernel reads at a time."""


class AnaphoraMemory:
    """num_blocks = bytes of the pool // bytes of a block; nothing is kept back, prefixes are reused to the token."""

    name = "anaphora"

    def capacity(self, geometry: ModelGeometry, settings: EngineSettings, available_bytes: int) -> Capacity:
        """Blocks, tokens and concurrency for a pool of `available_bytes`. Raises ConfigError, UnsupportedModel."""
        layout = _layout(geometry, settings)
        block_bytes = _block_bytes(layout, settings)
        blocks = available_bytes // block_bytes
        batch = batched_tokens(settings)
        per_request = layout.blocks_for(settings.max_model_len, batch)
        groups = tuple(
            GroupCapacity(
                "full" if group.window is None else "sliding",
                len(group.layers),
                layout.block_size,
                group.window,
                CacheLayout((group,), layout.slots, 1, 1, 1, layout.block_size).blocks_for(
                    settings.max_model_len, batch
                ),
            )
            for group in layout.groups
        )
        tokens = blocks * layout.block_size // len(layout.groups)
        return Capacity(
            available_bytes=available_bytes,
            block_bytes=block_bytes,
            num_blocks=blocks,
            block_size=layout.block_size,
            groups=groups,
            blocks_per_request=per_request,
            max_concurrency=blocks / per_request,
            tokens=tokens,
            tokens_older=tokens,
            reuse_step=0 if settings.enable_prefix_caching is False else 1,
            kept_back=0,
        )

    def longest_context(self, geometry: ModelGeometry, settings: EngineSettings, available_bytes: int) -> int:
        """The longest request the pool holds, at most `settings.max_model_len`."""
        layout = _layout(geometry, settings)
        blocks, batch = available_bytes // _block_bytes(layout, settings), batched_tokens(settings)
        return largest(settings.max_model_len, lambda length: layout.blocks_for(length, batch) <= blocks)


def keeps_bfloat16(geometry: ModelGeometry, block_size: int | None) -> bool:
    """Whether a CPU without bfloat16 instructions runs the model in bfloat16: the native kernels do, torch does not."""
    return geometry.model_type in NATIVE_FAMILIES and (block_size or DEFAULT_BLOCK) % _NATIVE_STEP == 0


def bytes_per_token(geometry: ModelGeometry, settings: EngineSettings) -> int:
    """Of all layers, scales included. Raises ConfigError, UnsupportedModel."""
    return _dtype(settings).bytes_per_token(_layout(geometry, settings))


def batched_tokens(settings: EngineSettings) -> int:
    """max_num_batched_tokens: 512 on a CPU, 2,048 on a GPU unless it is given."""
    return settings.max_num_batched_tokens or (512 if settings.device == "cpu" else 2048)


def _layout(geometry: ModelGeometry, settings: EngineSettings) -> CacheLayout:
    if settings.tensor_parallel_size > 1 or settings.pipeline_parallel_size > 1:
        raise ConfigError("anaphora runs on one device; for --tp or --pp plan another engine, such as --engine vllm")
    size = settings.block_size or DEFAULT_BLOCK
    if not 1 <= size <= 256 or size & (size - 1):
        raise ConfigError(f"block_size is {size}; anaphora takes a power of two from 1 to 256, for example 16")
    return CacheLayout.of(geometry, size)


def _block_bytes(layout: CacheLayout, settings: EngineSettings) -> int:
    return BlockMap(layout, _dtype(settings)).block_bytes


def _dtype(settings: EngineSettings) -> KVDtype:
    return kv_dtype(settings.kv_cache_dtype, own="float32" if settings.model_dtype_bytes == 4 else "bfloat16")
