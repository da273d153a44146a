"""What llama.cpp (llama-server, Ollama) allots: one slot a request, all of it at start.

Read from llama.cpp of October 2026.

    full layers      n_ctx cells a slot, rounded up to 256
    sliding layers   min(n_ctx, window + n_ubatch) cells a slot, rounded up to 256 (src/llama-kv-cache-iswa.cpp);
                     with -kvu one cache of window x slots + n_ubatch cells serves all
    states           one a slot, in float32
    a cell           kv_heads x key_dim numbers of -ctk and kv_heads x value_dim of -ctv; quantised types in blocks of
                     32 with their scales (q8_0: 34 bytes)

`-c` is the sum over the slots of `-np`: a context of 32,768 for 16 users is `-c 524288 -np 16`. With `-np` left open
the server has 4 slots on one unified cache of `-c` cells. Slots share no cells: a prefix is reused only inside the slot
that last held it.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from anaphora.errors import ConfigError, UnsupportedModel
from anaphora.geometry.formula import KV_DTYPES as FORMS
from anaphora.geometry.model import Keeps, LayerKV, ModelGeometry
from anaphora.planning.protocol import Capacity, EngineSettings, GroupCapacity
from anaphora.planning.search import largest

PAD = 256
DEFAULT_UBATCH = 512
TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
OLLAMA_TYPES = ("f16", "q8_0", "q4_0")
_SAME = {"auto": "f16", "float16": "f16", "bfloat16": "bf16", "float32": "f32", "int8": "q8_0", "int4": "q4_0"}
_WINDOWED = {Keeps.SLIDING, Keeps.CHUNKED}


class LlamaCppMemory:
    """llama-server's arithmetic, a slot a request (-np N)."""

    name = "llama.cpp"
    types: tuple[str, ...] = TYPES

    def capacity(self, geometry: ModelGeometry, settings: EngineSettings, available_bytes: int) -> Capacity:
        """Slots of `max_model_len` tokens in the bytes of all devices. Raises ConfigError, UnsupportedModel."""
        cells = pad(settings.max_model_len)
        full, sliding, state = self.slot_bytes(geometry, settings)
        slot = full + sliding + state
        slots = available_bytes // slot if slot else 0
        return Capacity(
            available_bytes=available_bytes,
            block_bytes=slot,
            num_blocks=slots,
            block_size=cells,
            groups=(GroupCapacity("slot", len(geometry.layers), cells, None, 1, pool_blocks=slots),),
            blocks_per_request=1,
            max_concurrency=float(available_bytes / slot) if slot else float("inf"),
            tokens=slots * settings.max_model_len,
            tokens_older=slots * settings.max_model_len,
            reuse_step=0 if settings.enable_prefix_caching is False else 1,
            kept_back=0,
        )

    def slot_bytes(self, geometry: ModelGeometry, settings: EngineSettings) -> tuple[int, int, int]:
        """Bytes of a slot's (full layers, sliding layers, states)."""
        keys, values = self._forms(settings.kv_cache_dtype)
        if any(layer.keeps in (Keeps.COMPRESSED, Keeps.CROSS) or layer.side for layer in geometry.layers):
            raise UnsupportedModel(
                f"{geometry.architecture}: llama.cpp's cache for compressed, indexed or cross attention is not "
                "modelled here. `anaphora kv` gives its bytes"
            )
        cells = pad(settings.max_model_len)
        ubatch = settings.max_num_batched_tokens or DEFAULT_UBATCH
        full = sliding = state = 0
        for layer in geometry.layers:
            cell = cell_bytes(layer, keys, values)
            if layer.keeps in _WINDOWED and layer.window:
                sliding += cell * min(cells, pad(min(cells, layer.window + ubatch)))
            else:
                full += cell * cells
            if layer.state:
                state += replace(layer.state, state_bytes=4).bytes(model_dtype_bytes=4)
        return full, sliding, state

    def unified_sliding_bytes(self, geometry: ModelGeometry, settings: EngineSettings, slots: int) -> int:
        """Bytes of the sliding layers of all slots on one unified cache (-kvu, and the default without -np)."""
        keys, values = self._forms(settings.kv_cache_dtype)
        ubatch = settings.max_num_batched_tokens or DEFAULT_UBATCH
        total = 0
        for layer in geometry.layers:
            if layer.keeps in _WINDOWED and layer.window:
                cells = pad(min(pad(settings.max_model_len), layer.window * slots + ubatch))
                total += cell_bytes(layer, keys, values) * cells
        return total

    def longest_context(self, geometry: ModelGeometry, settings: EngineSettings, available_bytes: int) -> int:
        """The longest context of one slot, at most `settings.max_model_len`."""

        def fits(length: int) -> bool:
            return sum(self.slot_bytes(geometry, replace(settings, max_model_len=length))) <= available_bytes

        return largest(settings.max_model_len, fits)

    def _forms(self, name: str) -> tuple[Fraction, Fraction]:
        """Bytes of a number in (-ctk, -ctv): one type for both, or "q8_0/q4_0"."""
        first, _, second = name.partition("/")
        found = []
        for given in (first, second or first):
            kind = _SAME.get(given, given)
            if kind not in self.types:
                raise ConfigError(
                    f"KV type {given!r} is not known to {self.name}; it has {', '.join(self.types)} "
                    "(keys/values apart as in q8_0/q4_0)"
                )
            found.append(FORMS[kind].element)
        return found[0], found[1]


class OllamaMemory(LlamaCppMemory):
    """Ollama runs llama-server: num_ctx a slot, OLLAMA_NUM_PARALLEL slots, OLLAMA_KV_CACHE_TYPE for both halves."""

    name = "ollama"
    types = OLLAMA_TYPES


def cell_bytes(layer: LayerKV, keys: Fraction, values: Fraction) -> int:
    """One token's row of keys and row of values in a layer; rows of quantised types are whole blocks."""
    return _row(layer.kv_heads * layer.key_dim, keys) + _row(layer.kv_heads * layer.value_dim, values)


def _row(numbers: int, element: Fraction) -> int:
    return -(-numbers * element.numerator // element.denominator)


def pad(cells: int) -> int:
    """Up to a multiple of 256."""
    return -(-cells // PAD) * PAD
