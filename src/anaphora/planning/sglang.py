"""What SGLang makes of the bytes it has for KV. Read from SGLang 0.5.23, srt/model_executor/pool_configurator.py.

    plain        tokens = available // bytes of a token, down to a whole page (default page: 1 token)
    windows      two pools: full layers keep `tokens`, sliding ones 0.8 x tokens (--swa-full-tokens-ratio); only for
                 the architectures that SGLang lists, elsewhere a sliding layer keeps every token
    states       0.9 / 1.9 of the bytes are cut into states (--mamba-full-memory-ratio), three a running request

Keys and values lie in two buffers of equal length. MLA is not divided by TP.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from anaphora.errors import ConfigError, UnsupportedModel
from anaphora.geometry.model import Keeps, LayerKV, ModelGeometry
from anaphora.planning.protocol import Capacity, EngineSettings, GroupCapacity
from anaphora.planning.search import largest

SWA_RATIO = Fraction(8, 10)
MAMBA_RATIO = Fraction(9, 10)
STATES_PER_REQUEST = 3
"""With the radix cache: one runs, two are kept for the tree (MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO)."""
_ELEMENT = {"float16": 2, "bfloat16": 2, "bf16": 2, "fp8_e5m2": 1, "fp8_e4m3": 1, "fp8": 1}
KV_DTYPES = ("auto", *_ELEMENT)
_TWO_POOLS = (
    *("Llama4ForConditionalGeneration", "GptOssForCausalLM", "Step3p5ForCausalLM", "LagunaForCausalLM"),
    *("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"),
)
_WINDOWED = {Keeps.SLIDING, Keeps.CHUNKED}


class SglangMemory:
    """SGLang 0.5.23's arithmetic."""

    name = "sglang"

    def capacity(self, geometry: ModelGeometry, settings: EngineSettings, available_bytes: int) -> Capacity:
        """Pages, tokens and concurrency for `available_bytes` per device. Raises ConfigError, UnsupportedModel."""
        full, sliding, state = _cells(geometry, settings)
        page = settings.block_size or 1
        window = max((layer.window or 0 for layer in geometry.layers if layer.keeps in _WINDOWED), default=0)
        pages_of = per_request = _pages(settings.max_model_len, page)
        groups = []
        radix = settings.enable_prefix_caching is not False
        if state:
            budget = available_bytes * MAMBA_RATIO / (1 + MAMBA_RATIO)
            slots = max(0, int((budget - state) // state))
            available_bytes -= (slots + 1) * state  # one more for padding
            layers = sum(layer.state is not None for layer in geometry.layers)
            held = STATES_PER_REQUEST if radix else 1
            groups.append(GroupCapacity("state", layers, 1, None, held, pool_blocks=slots))
        cell: Fraction = full + SWA_RATIO * sliding if full else Fraction(sliding)
        tokens = int(max(0, available_bytes) / cell) // page * page if cell else 0
        if full:
            count = sum(layer.kv_heads > 0 and layer.keeps not in _WINDOWED for layer in geometry.layers)
            if not sliding:
                count = sum(layer.kv_heads > 0 for layer in geometry.layers)
            groups.insert(0, GroupCapacity("full", count, page, None, pages_of))
        if sliding:
            kept = int(tokens * SWA_RATIO) // page if full else tokens // page
            held = min(pages_of, _pages(window, page) + 1)
            per_request = pages_of if full else held
            count = sum(layer.keeps in _WINDOWED for layer in geometry.layers)
            groups.append(GroupCapacity("sliding", count, page, window, held, pool_blocks=kept))
        num_blocks = tokens // page
        concurrency = num_blocks / per_request if cell else float("inf")
        for group in groups:
            if group.pool_blocks is not None:
                concurrency = min(concurrency, group.pool_blocks / group.blocks_per_request)
        return Capacity(
            available_bytes=available_bytes,
            block_bytes=int(cell * page),
            num_blocks=num_blocks,
            block_size=page,
            groups=tuple(groups),
            blocks_per_request=per_request,
            max_concurrency=concurrency,
            tokens=tokens,
            tokens_older=tokens,
            reuse_step=page if radix else 0,
            kept_back=0,
        )

    def longest_context(self, geometry: ModelGeometry, settings: EngineSettings, available_bytes: int) -> int:
        """The longest request that fits, at most `settings.max_model_len`."""

        def fits(length: int) -> bool:
            at = replace(settings, max_model_len=length)
            return self.capacity(geometry, at, available_bytes).max_concurrency >= 1

        return largest(settings.max_model_len, fits)


def _cells(geometry: ModelGeometry, settings: EngineSettings) -> tuple[int, int, int]:
    """Bytes on one rank of (a token in full layers, a token in sliding layers, a request's states)."""
    dtype = settings.kv_cache_dtype
    if dtype != "auto" and dtype not in _ELEMENT:
        raise ConfigError(f"kv_cache_dtype {dtype!r} is not known; SGLang has {', '.join(KV_DTYPES)} (no int8)")
    element = settings.model_dtype_bytes if dtype == "auto" else _ELEMENT[dtype]
    if any(layer.keeps in (Keeps.COMPRESSED, Keeps.CROSS) for layer in geometry.layers):
        raise UnsupportedModel(
            f"{geometry.architecture}: SGLang sizes its compressed or cross attention by rules that are not modelled "
            "here. `anaphora kv` gives its bytes; --engine vllm plans most of these models"
        )
    tp = settings.tensor_parallel_size
    if geometry.query_heads % tp:
        raise ConfigError(
            f"{geometry.architecture} has {geometry.query_heads} attention heads, which tensor parallelism over {tp} "
            "does not divide. Use a divisor of it"
        )
    two_pools = geometry.architecture in _TWO_POOLS
    full = sliding = state = 0
    for layer in geometry.layers:
        size = _token(layer, tp, element) + sum(cache.width * (cache.element_bytes or element) for cache in layer.side)
        if two_pools and layer.keeps in _WINDOWED:
            sliding += size
        else:
            full += size
        if layer.state:
            state += layer.state.bytes(tp, settings.model_dtype_bytes)
    stages = settings.pipeline_parallel_size
    return -(-full // stages), -(-sliding // stages), -(-state // stages)


def _token(layer: LayerKV, tp: int, element: int) -> int:
    if layer.keeps is Keeps.LATENT:
        return layer.bytes_per_token(element)
    heads = max(1, layer.kv_heads // tp) if layer.kv_heads else 0
    return heads * (layer.key_dim + layer.value_dim) * element


def _pages(tokens: int, page: int) -> int:
    return -(-tokens // page)
