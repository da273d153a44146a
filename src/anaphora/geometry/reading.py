"""A config's language part -> one LayerKV per layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from anaphora.errors import CorruptModel, UnsupportedModel
from anaphora.geometry.families import MLA_TYPES, is_known, kinds_of, window_of
from anaphora.geometry.fields import SPELLINGS, Fields
from anaphora.geometry.layers import NOTHING, Keeps, LayerKV, SideCache
from anaphora.geometry.states import state_of

NEEDED = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size")
_SINKS = {"gpt_oss", "mimo_v2", "mimo_v2_flash", "granite_swa", "granitemoe_swa"}
_INDEX_SCALE_BYTES = 4
"""DeepSeek's sparse attention keeps index keys in fp8 with one float32 scale per 128 of them."""


def read_layers(fields: Fields, *, assume_full_attention: bool = False) -> tuple[LayerKV, ...]:
    """What each layer keeps. Raises UnsupportedModel for a type not known, CorruptModel for a key that is wrong."""
    if assume_full_attention and not is_known(fields.model_type):
        return (attention_of(fields),) * fields.need("num_hidden_layers")
    special = _SPECIAL.get(fields.model_type)
    if special is not None:
        return special(fields)
    if fields.raw.get("is_encoder_decoder"):
        return _encoder_decoder(fields)
    if not is_known(fields.model_type):
        raise UnsupportedModel(_unknown(fields))
    return _regular(fields)


def _unknown(fields: Fields) -> str:
    lacking = [key for key in NEEDED[:-1] if fields.get(key) is None]
    return (
        f"{fields.architecture} (model_type {fields.model_type!r}) is not known, so what its layers keep would be a "
        f"guess. Needed are {', '.join(NEEDED)} and, per layer, full, sliding or linear attention"
        f"{' (its config lacks ' + ', '.join(lacking) + ')' if lacking else ''}. "
        "anaphora kv and plan size every layer as full attention with --assume-full-attention, and say so"
    )


def head_dim_of(fields: Fields) -> int:
    """The config's head_dim, else width over heads. Raises CorruptModel when that does not divide."""
    own = fields.integer("head_dim") if fields.get("head_dim") != 0 else None
    if own is not None:
        return own
    hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    if fields.model_type == "zamba2":  # it attends to the hidden state and the embedding side by side
        hidden *= 2
    if hidden % heads:
        raise CorruptModel(f"config.json: hidden_size {hidden} is not divisible by {heads} heads; set head_dim")
    return hidden // heads


def kv_heads_of(fields: Fields) -> int:
    """KV heads, in the newest and the oldest spellings. Raises CorruptModel when they do not divide the heads."""
    heads = fields.need("num_attention_heads")
    nested = fields.mapping("attn_config")  # DBRX and MPT
    found: Any
    if fields.model_type in ("falcon", "RefinedWeb", "RefinedWebModel") and not fields.get("new_decoder_architecture"):
        found = 1 if fields.get("multi_query") else fields.get("n_head_kv")
    elif fields.raw.get("multi_query_attention"):
        found = fields.need("multi_query_group_num")
    elif fields.raw.get("multi_query") and not fields.has("num_key_value_heads"):
        found = 1
    elif nested:
        found = nested.get("kv_n_heads") or (1 if nested.get("attn_type") == "multiquery_attention" else None)
    else:
        found = fields.integer("num_key_value_heads")
    return _dividing(heads, found or heads)


def _dividing(heads: int, kv_heads: Any) -> int:
    """`kv_heads` when the query heads can be shared out evenly over them. Raises CorruptModel."""
    if not isinstance(kv_heads, int) or kv_heads <= 0 or heads % kv_heads:
        raise CorruptModel(f"config.json: {heads} query heads are not divisible by {kv_heads} KV heads")
    return kv_heads


def attention_of(fields: Fields) -> LayerKV:
    """Full attention with the model's own heads and widths, latent where the family caches that."""
    rank = fields.get("kv_lora_rank")
    if rank and fields.model_type in MLA_TYPES:
        side: tuple[SideCache, ...] = ()
        if fields.raw.get("index_head_dim"):
            side = (_index_cache(fields.need("index_head_dim")),)
        return LayerKV(
            1, fields.need("kv_lora_rank") + fields.count("qk_rope_head_dim"), 0, keeps=Keeps.LATENT, side=side
        )
    if rank:  # MiniCPM3: engines expand the latent and cache whole heads
        dim = fields.need("qk_nope_head_dim") + fields.need("qk_rope_head_dim")
        return LayerKV(kv_heads_of(fields), dim, dim)
    dim = head_dim_of(fields)
    return LayerKV(kv_heads_of(fields), dim, dim)


def _index_cache(dim: int, tokens_per_entry: int = 1) -> SideCache:
    width = dim + -(-dim // 128) * _INDEX_SCALE_BYTES
    return SideCache("indexer", width, element_bytes=1, tokens_per_entry=tokens_per_entry)


def _regular(fields: Fields) -> tuple[LayerKV, ...]:
    num_layers = fields.need("num_hidden_layers")
    kinds = kinds_of(fields, num_layers)
    full = attention_of(fields) if {"full", "sliding", "chunked", "both"} & set(kinds) else NOTHING
    if fields.model_type in _SINKS:
        full = replace(full, sink=True)
    window = window_of(fields) if "sliding" in kinds else None
    makers: dict[str, LayerKV] = {"full": full, "nothing": NOTHING, "sliding": full}
    if window is not None:
        makers["sliding"] = replace(full, window=window, keeps=Keeps.SLIDING)
    if "chunked" in kinds:
        chunk = fields.need("attention_chunk_size")
        makers["chunked"] = replace(full, window=chunk, keeps=Keeps.CHUNKED)
    if {"state", "both"} & set(kinds):
        state = state_of(fields)
        makers["state"] = LayerKV(0, 0, 0, keeps=Keeps.STATE, state=state)
        makers["both"] = replace(full, state=state)
    layers = [makers[kind] for kind in kinds]
    return tuple(_adjust(fields, layers))


def _adjust(fields: Fields, layers: list[LayerKV]) -> list[LayerKV]:
    """What a family changes in some layers after the general reading."""
    for change in (
        _own_global_heads,
        _own_sliding_heads,
        _own_heads_by_layer,
        _index_shared,
        _sparse_index,
        _shared_kv,
    ):
        layers = change(fields, layers)
    return layers


def _own_global_heads(fields: Fields, layers: list[LayerKV]) -> list[LayerKV]:
    """Gemma 4: global layers have their own head_dim and, with K = V, their own KV heads."""
    if not fields.model_type.startswith("gemma4"):
        return layers
    dim = fields.integer("global_head_dim") or 512
    heads = fields.integer("num_global_key_value_heads") if fields.get("attention_k_eq_v") else None

    def widen(layer: LayerKV) -> LayerKV:
        return replace(layer, kv_heads=heads or layer.kv_heads, key_dim=dim, value_dim=dim)

    return [widen(layer) if layer.keeps is Keeps.FULL else layer for layer in layers]


def _own_sliding_heads(fields: Fields, layers: list[LayerKV]) -> list[LayerKV]:
    """MiMo-V2 and Step-3.5: sliding layers have their own heads; values may be narrower than keys."""
    value = fields.integer("v_head_dim") if fields.model_type.startswith("mimo_v2") else None
    if value is not None:
        layers = [replace(layer, value_dim=value) if layer.kv_heads else layer for layer in layers]
    other = fields.mapping("attention_other_setting")
    heads = fields.integer("swa_num_key_value_heads") or other.get("num_attention_groups")
    key = fields.integer("swa_head_dim") or other.get("head_dim")
    swa_value = fields.integer("swa_v_head_dim") or key

    def own(layer: LayerKV) -> LayerKV:
        return replace(
            layer,
            kv_heads=heads or layer.kv_heads,
            key_dim=key or layer.key_dim,
            value_dim=swa_value or layer.value_dim,
        )

    return [own(layer) if layer.keeps is Keeps.SLIDING else layer for layer in layers]


def _own_heads_by_layer(fields: Fields, layers: list[LayerKV]) -> list[LayerKV]:
    """KV heads that differ by layer.

    DeciLM: `num_key_value_heads_per_layer`. Nemotron-NAS: `block_configs` says per layer how many heads share a KV
    head, or that there is no attention.
    """
    counts = fields.sequence("num_key_value_heads_per_layer", len(layers))
    if counts:
        heads = fields.need("num_attention_heads")
        return [replace(layer, kv_heads=_dividing(heads, count)) for layer, count in zip(layers, counts, strict=True)]
    blocks = fields.sequence("block_configs", len(layers))
    if not blocks:
        return layers
    heads = fields.need("num_attention_heads")

    def own(layer: LayerKV, block: Any) -> LayerKV:
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            return layer
        if attention.get("no_op") or attention.get("replace_with_linear"):
            return NOTHING
        grouped = attention.get("n_heads_in_group")
        return replace(layer, kv_heads=heads // grouped) if grouped else layer

    return [own(layer, block) for layer, block in zip(layers, blocks, strict=True)]


def _index_shared(fields: Fields, layers: list[LayerKV]) -> list[LayerKV]:
    """GLM-5.2: only some layers keep an index; the others use that of the layer before."""
    if not any(layer.side for layer in layers):
        return layers
    types = fields.sequence("indexer_types", len(layers))
    pattern = fields.raw.get("index_topk_pattern")
    every, offset = fields.integer("index_topk_freq") or 1, fields.raw.get("index_skip_topk_offset", 2)

    def keeps_index(i: int) -> bool:
        if pattern is not None:
            return not (i < len(pattern) and pattern[i] == "S")
        if types:
            return str(types[i]) == "full"
        return max(i - int(offset) + 1, 0) % every == 0

    return [layer if keeps_index(i) else replace(layer, side=()) for i, layer in enumerate(layers)]


def _sparse_index(fields: Fields, layers: list[LayerKV]) -> list[LayerKV]:
    """MiniMax-M3: sparse layers keep one index key a token, always in the model's own 16-bit dtype."""
    sparse = fields.mapping("sparse_attention_config")
    flags = sparse.get("sparse_attention_freq") if sparse.get("use_sparse_attention") else None
    if not flags:
        return layers
    index = SideCache("indexer", int(sparse.get("sparse_index_dim", 128)), element_bytes=2)
    return [
        replace(layer, side=(index,)) if flag and layer.kv_heads else layer
        for layer, flag in zip(layers, flags, strict=False)
    ]


def _shared_kv(fields: Fields, layers: list[LayerKV]) -> list[LayerKV]:
    """Gemma 3n and 4: the last layers read the cache of the last own layer of the same kind."""
    shared = fields.count("num_kv_shared_layers")
    if not shared:
        return layers
    first = len(layers) - shared
    last = {layer.keeps: i for i, layer in enumerate(layers[:first])}
    for i in range(first, len(layers)):
        source = last.get(layers[i].keeps)
        if source is None:
            raise CorruptModel(f"config.json: layer {i} shares the cache of a kind that no layer before {first} has")
        layers[i] = LayerKV(0, 0, 0, keeps=Keeps.SHARED, source=source)
    return layers


def _deepseek_v4(fields: Fields) -> tuple[LayerKV, ...]:
    """DeepSeek V4: a window of latents, and one compressed latent for every 4 or 128 tokens.

    A latent is 448 bytes of fp8, 64 rope values in bf16 and 8 scales: 584 bytes for head_dim 512. The compressor
    keeps its unfinished entries in float32; layers of ratio 4 overlap and select through an indexer.
    """
    num_layers = fields.need("num_hidden_layers")
    ratios = fields.sequence("compress_ratios", num_layers)
    if ratios is None:
        raise CorruptModel(f"config.json of {fields.architecture} lacks compress_ratios; the model cannot be sized")
    dim, rope = head_dim_of(fields), fields.need("qk_rope_head_dim")
    window, index = window_of(fields), fields.need("index_head_dim")
    width = (dim - rope) + 2 * rope + 8
    recent = SideCache("window", width, element_bytes=1, window=window)

    def layer(ratio: int) -> LayerKV:
        if ratio <= 1:
            return LayerKV(0, 0, 0, keeps=Keeps.COMPRESSED, side=(recent,))
        overlap = 2 if ratio == 4 else 1
        compressed = SideCache("compressed", width, element_bytes=1, tokens_per_entry=ratio)
        state = SideCache("compressor", 2 * overlap * dim, element_bytes=4, window=overlap * ratio)
        side: tuple[SideCache, ...] = (recent, compressed, state)
        if ratio == 4:
            indexer = (
                _index_cache(index, ratio),
                SideCache("index compressor", 2 * overlap * index, element_bytes=4, window=overlap * ratio),
            )
            side = (recent, *indexer, compressed, state)
        return LayerKV(0, 0, 0, keeps=Keeps.COMPRESSED, side=side)

    return tuple(layer(int(ratio)) for ratio in ratios)


def _mllama(fields: Fields) -> tuple[LayerKV, ...]:
    """Llama 3.2 Vision: cross layers keep the image's keys and values, and nothing per token of text."""
    own = attention_of(fields)
    crossing = {int(i) for i in fields.sequence("cross_attention_layers") or ()}
    vision = fields.whole.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    patches = (int(vision.get("image_size", 448)) // int(vision.get("patch_size", 14))) ** 2 + 1
    entries = patches * int(vision.get("max_num_tiles", 4))
    cross = _cross_layer(own, entries)
    return tuple(cross if i in crossing else own for i in range(fields.need("num_hidden_layers")))


def _cross_layer(own: LayerKV, entries: int) -> LayerKV:
    width = own.kv_heads * (own.key_dim + own.value_dim)
    return LayerKV(0, 0, 0, keeps=Keeps.CROSS, side=(SideCache("cross", width, fixed_entries=entries),))


def _encoder_decoder(fields: Fields) -> tuple[LayerKV, ...]:
    """Whisper, BART, T5: each decoder layer keeps its own tokens and, once, those of the encoder."""
    raw = fields.raw
    layers = raw.get("decoder_layers") or raw.get("num_decoder_layers") or fields.need("num_hidden_layers")
    heads = raw.get("decoder_attention_heads") or fields.need("num_attention_heads")
    dim = raw.get("d_kv") or fields.need("hidden_size") // heads
    entries = raw.get("max_source_positions") or raw.get("max_position_embeddings") or raw.get("n_positions")
    if not entries:
        raise CorruptModel(
            f"config.json of {fields.architecture} lacks max_source_positions; its cross attention cannot be sized"
        )
    cross = _cross_layer(LayerKV(heads, dim, dim), entries).side
    return (LayerKV(heads, dim, dim, side=cross),) * layers


def _openelm(fields: Fields) -> tuple[LayerKV, ...]:
    """OpenELM: a list of KV heads, one per layer."""
    dim = head_dim_of(fields)
    heads = fields.sequence("num_key_value_heads")
    if not heads:
        raise CorruptModel(f"config.json of {fields.architecture} lacks {' / '.join(SPELLINGS['num_key_value_heads'])}")
    return tuple(LayerKV(int(count), dim, dim) for count in heads)


def _repeated(times: Callable[[Fields], int]) -> Callable[[Fields], tuple[LayerKV, ...]]:
    """Layers that attend more than once keep a cache for each time."""
    return lambda fields: (attention_of(fields),) * (fields.need("num_hidden_layers") * times(fields))


_SPECIAL: dict[str, Callable[[Fields], tuple[LayerKV, ...]]] = {
    "deepseek_v4": _deepseek_v4,
    "longcat_flash": _repeated(lambda fields: 2),  # two attentions in every layer
    "mllama_text_model": _mllama,
    "openelm": _openelm,
    "ouro": _repeated(lambda fields: fields.integer("total_ut_steps") or 4),  # the stack runs several times
}
"""Families whose layers are built in a way of their own."""
