"""vLLM's view of each layer: a cache spec with a block size in tokens and a page size in bytes, on one rank.

Read from vLLM 0.32.0: v1/kv_cache_interface.py (sizes), platforms/interface.py (block sizes), the attention
layers' get_kv_cache_spec and model_executor/layers/mamba/mamba_utils.py (states).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from anaphora.errors import ConfigError, UnsupportedModel
from anaphora.geometry.model import Keeps, LayerKV, ModelGeometry, RecurrentState, SideCache
from anaphora.planning.protocol import EngineSettings

_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
_SCALE_BYTES = 4
KV_DTYPES = (
    *("auto", "float16", "bfloat16", *_FP8, "fp8_ds_mla", "nvfp4", "nvfp4_4over6"),
    *("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"),
)
_WINDOW_AND_ONE = {"cohere2", "cohere2_moe"}
"""vLLM lets these see `sliding_window` tokens before the current one."""
_CHECKPOINTS = {"mamba2", "bounded_kda"}
"""States that keep one more block for the state in the middle of a prefill."""
_DS_MLA_BYTES = 656
_V4_PAGE_ALIGNMENT = 576
_V4_BLOCK = {"window": 64, "compressed": 256, "indexer": 256}
_V4_STATE_BLOCK = {4: 4, 128: 8}
"""Blocks of a compressor's unfinished entries, by ratio, so that their pages match those of the latents."""


class Kind(Enum):
    """The classes of vLLM's specs that are counted apart."""

    FULL = "full"
    MLA = "mla"
    SLIDING = "sliding"
    SLIDING_MLA = "sliding mla"
    CHUNKED = "chunked"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One cache of one layer on one rank. Equal specs may share a group."""

    kind: Kind
    block_size: int
    page_bytes: int
    """Bytes of a block of this layer, padding included."""
    window: int | None = None
    shape: tuple[int, ...] = ()
    """KV heads and widths: what must agree besides the page."""
    states: int = 0
    """Blocks of a recurrent state a request holds."""

    def blocks(self, max_len: int, in_flight: int) -> int:
        """Most blocks a request of `max_len` tokens holds, with `in_flight` tokens scheduled and not yet settled."""
        if self.kind is Kind.STATE:
            return self.states
        if self.window is None:
            return _ceil(max_len, self.block_size)
        if self.kind is Kind.CHUNKED:
            return _ceil(min(self.window + in_flight, max_len), self.block_size)
        return _ceil(min(self.window - 1 + in_flight, max_len), self.block_size) + 1


def layer_specs(geometry: ModelGeometry, settings: EngineSettings, prefix_caching: bool) -> list[list[CacheSpec]]:
    """The specs of each layer, in the order vLLM registers them. Raises ConfigError, UnsupportedModel."""
    _check(geometry, settings)
    block_size, state_page = block_sizes(geometry, settings)
    found = {
        layer: list(_of_layer(geometry, layer, settings, block_size, state_page, prefix_caching))
        for layer in dict.fromkeys(geometry.layers)
    }
    return [found[layer] for layer in geometry.layers]


def block_sizes(geometry: ModelGeometry, settings: EngineSettings) -> tuple[int, int | None]:
    """(tokens per block of attention, padded page of a recurrent state).

    Hybrids get blocks so long that an attention page is at least as large as a state, and states padded to that.
    """
    block = settings.block_size or _default_block(geometry, settings)
    if settings.device == "cpu" and _latent(geometry):
        block = 16  # the only one its kernel has
    states = [_state_bytes(layer.state, settings) for layer in geometry.layers if layer.state]
    attention = next((layer for layer in geometry.layers if layer.kv_heads), None)
    if not states or attention is None:
        return block, None
    per_token = _token_bytes(attention, settings, _indexed(geometry))
    step = max(block, 128) if attention.keeps is Keeps.LATENT else block
    block = max(block, step * _ceil(max(states), step * per_token))
    return block, block * per_token


def token_bytes(key_dim: int, value_dim: int, kv_cache_dtype: str, model_dtype_bytes: int) -> int:
    """Bytes of one token in one KV head. Raises ConfigError for a dtype that is not known."""
    if kv_cache_dtype == "auto":
        return (key_dim + value_dim) * model_dtype_bytes
    if kv_cache_dtype in ("float16", "bfloat16"):
        return (key_dim + value_dim) * 2
    if kv_cache_dtype in _FP8:
        return key_dim + value_dim
    if kv_cache_dtype.startswith("nvfp4") and kv_cache_dtype in KV_DTYPES:
        return sum(dim // 2 + dim // 16 for dim in (key_dim, value_dim))
    if kv_cache_dtype.endswith("_per_token_head") and kv_cache_dtype in KV_DTYPES:
        halves = 2 if kv_cache_dtype.startswith("int4") else 1
        return key_dim // halves + value_dim // halves + 2 * _SCALE_BYTES
    raise ConfigError(f"kv_cache_dtype {kv_cache_dtype!r} is not known; vLLM has {', '.join(KV_DTYPES)}")


def _token_bytes(layer: LayerKV, settings: EngineSettings, indexed: bool) -> int:
    """Bytes of one token in all of a layer's heads on one rank. `indexed`: the model's attention is sparse."""
    if layer.keeps is Keeps.LATENT and indexed and settings.kv_cache_dtype in (*_FP8, "fp8_ds_mla"):
        return _DS_MLA_BYTES  # sparse MLA: 512 fp8, 4 scales, 64 rope values in bf16
    dtype = "fp8" if settings.kv_cache_dtype == "fp8_ds_mla" else settings.kv_cache_dtype
    per_head = token_bytes(layer.key_dim, layer.value_dim, dtype, settings.model_dtype_bytes)
    return _heads(layer, settings) * per_head


def _state_bytes(state: RecurrentState, settings: EngineSettings) -> int:
    """Bytes of one state on one rank; on a CPU (with AVX-512) the recurrent part is float32."""
    if settings.device == "cpu":
        state = replace(state, state_bytes=4)
    return state.bytes(settings.tensor_parallel_size, settings.model_dtype_bytes)


def _heads(layer: LayerKV, settings: EngineSettings) -> int:
    """KV heads on one rank: divided, or replicated once there are fewer than ranks. A latent is not divided."""
    return 1 if layer.keeps is Keeps.LATENT else max(1, layer.kv_heads // settings.tensor_parallel_size)


def _default_block(geometry: ModelGeometry, settings: EngineSettings) -> int:
    kinds = {layer.keeps for layer in geometry.layers}
    if Keeps.COMPRESSED in kinds:
        return 256
    if _latent(geometry):
        if _indexed(geometry):
            return 64
        if settings.device == "cpu":
            return 16
        major = settings.compute_capability // 10
        if major == 10:
            return 32  # FlashInfer's MLA kernels have 32 and 64
        return 64 if major == 9 and settings.kv_cache_dtype in _FP8 else 16  # FlashMLA has 64 only
    if _indexed(geometry):
        return 128
    return 128 if settings.device == "cpu" else 16


def _latent(geometry: ModelGeometry) -> bool:
    return any(layer.keeps is Keeps.LATENT for layer in geometry.layers)


def _indexed(geometry: ModelGeometry) -> bool:
    return any(cache.name == "indexer" for layer in geometry.layers for cache in layer.side)


def _of_layer(
    geometry: ModelGeometry,
    layer: LayerKV,
    settings: EngineSettings,
    block_size: int,
    state_page: int | None,
    prefix_caching: bool,
) -> Iterator[CacheSpec]:
    if layer.keeps is Keeps.COMPRESSED:
        yield from _compressed(layer)
        return
    for cache in layer.side:
        if cache.name == "indexer" and layer.keeps is Keeps.LATENT:
            yield _side(cache, block_size)
    if layer.state:
        size = _state_bytes(layer.state, settings)
        kept = 2 + (layer.state.family in _CHECKPOINTS) if prefix_caching else 1
        span = block_size if prefix_caching else settings.max_model_len
        yield CacheSpec(Kind.STATE, span, max(state_page or size, size), states=kept)
    if layer.kv_heads:
        yield _attention(geometry, layer, settings, block_size)
    for cache in layer.side:
        if cache.name == "indexer" and layer.keeps is not Keeps.LATENT:
            yield _side(cache, block_size)


def _attention(geometry: ModelGeometry, layer: LayerKV, settings: EngineSettings, block_size: int) -> CacheSpec:
    heads = _heads(layer, settings)
    page = block_size * _token_bytes(layer, settings, _indexed(geometry))
    shape = (heads, layer.key_dim, layer.value_dim)
    kind = {Keeps.SLIDING: Kind.SLIDING, Keeps.CHUNKED: Kind.CHUNKED, Keeps.LATENT: Kind.MLA}.get(
        layer.keeps, Kind.FULL
    )
    window = layer.window
    if window is not None and geometry.model_type in _WINDOW_AND_ONE:
        window += 1
    return CacheSpec(kind, block_size, page, window, shape)


def _side(cache: SideCache, block_size: int) -> CacheSpec:
    page = block_size * cache.width * (cache.element_bytes or 2)
    return CacheSpec(Kind.MLA, block_size, page, shape=(1, cache.width, 0))


def _compressed(layer: LayerKV) -> Iterator[CacheSpec]:
    """DeepSeek V4's caches: pages padded to 576 bytes, compressor states in blocks of 4 or 8 tokens."""
    ratio = max(cache.tokens_per_entry for cache in layer.side)
    for cache in layer.side:
        block = _V4_BLOCK.get(cache.name) or _V4_STATE_BLOCK.get(ratio)
        if block is None:
            raise UnsupportedModel(f"vLLM compresses 4 or 128 tokens into one entry, not {ratio}")
        content = block // cache.tokens_per_entry * cache.width * (cache.element_bytes or 2)
        kind = Kind.MLA if cache.window is None else Kind.SLIDING_MLA
        page = _ceil(content, _V4_PAGE_ALIGNMENT) * _V4_PAGE_ALIGNMENT
        yield CacheSpec(kind, block, page, cache.window, (1, cache.width, cache.tokens_per_entry))


def _check(geometry: ModelGeometry, settings: EngineSettings) -> None:
    """What vLLM refuses at start. Raises ConfigError, UnsupportedModel."""
    tp = settings.tensor_parallel_size
    name = geometry.architecture
    if any(cache.fixed_entries for layer in geometry.layers for cache in layer.side):
        raise UnsupportedModel(
            f"{name}: the cache of its cross attention depends on the encoder's input, which vLLM sizes by the "
            "processor's limits. `anaphora kv` gives its bytes"
        )
    if geometry.query_heads % tp:
        raise ConfigError(
            f"{name} has {geometry.query_heads} attention heads, which tensor parallelism over {tp} does not divide. "
            f"Use one of {_divisors(geometry.query_heads)}"
        )
    for layer in geometry.layers:
        heads = layer.kv_heads
        if heads and layer.keeps is not Keeps.LATENT and heads % tp and tp % heads:
            raise ConfigError(
                f"{name} has {heads} KV heads, which tensor parallelism over {tp} neither divides nor repeats. "
                f"Use one of {_divisors(heads)}"
            )
        if layer.state and any(n % tp for n in (layer.state.heads, layer.state.conv_channels)):
            raise ConfigError(
                f"{name}: the state of its recurrent layers has {layer.state.heads} heads, which tensor parallelism "
                f"over {tp} does not divide. Use one of {_divisors(layer.state.heads)}"
            )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in (1, 2, 4, 8, 16) if number % n == 0)


def _ceil(amount: int, step: int) -> int:
    return -(-amount // step)
