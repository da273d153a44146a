"""Reading config.json: spellings old and new, every kind of layer, and errors that say what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.errors import CorruptModel, UnsupportedModel
from anaphora.geometry.layers import RecurrentState
from anaphora.geometry.model import Keeps, LayerKV, ModelGeometry
from support.configs import LLAMA
from support.configs import geometry_of as of


def kinds(geometry: ModelGeometry) -> str:
    letter = {
        Keeps.FULL: "f",
        Keeps.LATENT: "f",
        Keeps.SLIDING: "s",
        Keeps.CHUNKED: "c",
        Keeps.STATE: "l",
        Keeps.SHARED: "-",
        Keeps.NOTHING: "n",
    }
    return "".join(letter[layer.keeps] for layer in geometry.layers)


def test_plain() -> None:
    geometry = of()
    assert geometry.layers == (LayerKV(2, 8, 8),) * 4
    assert (geometry.query_heads, geometry.hidden_size, geometry.vocab_size, geometry.max_position) == (8, 64, 100, 512)
    assert geometry.bytes_per_token(2) == 2 * 4 * 2 * 8 * 2
    assert not geometry.assumed_full_attention


@pytest.mark.parametrize(
    ("config", "layer", "count"),
    [
        (
            {"model_type": "falcon", "multi_query": True, "num_attention_heads": 71, "hidden_size": 4544},
            (1, 64, 64),
            32,
        ),
        ({"model_type": "falcon", "num_attention_heads": 71, "hidden_size": 4544}, (1, 64, 64), 32),  # class default
        (
            {
                "model_type": "falcon",
                "new_decoder_architecture": True,
                "num_kv_heads": 8,
                "num_attention_heads": 128,
                "hidden_size": 8192,
            },
            (8, 64, 64),
            32,
        ),
        (
            {"model_type": "gpt_bigcode", "n_layer": 32, "n_head": 48, "n_embd": 6144, "multi_query": True},
            (1, 128, 128),
            32,
        ),
        ({"model_type": "gpt2", "n_layer": 32, "n_head": 12, "n_embd": 768}, (12, 64, 64), 32),
        (
            {
                "model_type": "chatglm",
                "num_layers": 32,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
                "num_attention_heads": 32,
                "hidden_size": 4096,
                "kv_channels": 128,
            },
            (2, 128, 128),
            32,
        ),
        (
            {
                "model_type": "mpt",
                "n_layers": 32,
                "n_heads": 32,
                "d_model": 4096,
                "attn_config": {"attn_type": "multihead_attention"},
            },
            (32, 128, 128),
            32,
        ),
        (
            {
                "model_type": "mpt",
                "n_layers": 32,
                "n_heads": 32,
                "d_model": 4096,
                "attn_config": {"attn_type": "multiquery_attention"},
            },
            (1, 128, 128),
            32,
        ),
        (
            {"model_type": "dbrx", "n_layers": 32, "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8}},
            (8, 128, 128),
            32,
        ),
        (
            {
                "model_type": "deepseek_v2",
                "num_attention_heads": 16,
                "hidden_size": 2048,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
            },
            (1, 576, 0),
            32,
        ),
        (
            {
                "model_type": "longcat_flash",
                "num_layers": 14,
                "num_attention_heads": 16,
                "hidden_size": 2048,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
            },
            (1, 576, 0),
            28,
        ),
        (
            {"model_type": "ouro", "num_attention_heads": 16, "hidden_size": 2048, "total_ut_steps": 4},
            (16, 128, 128),
            128,
        ),
    ],
)
def test_heads_in_every_spelling(config: dict[str, Any], layer: tuple[int, int, int], count: int) -> None:
    base = {} if {"n_layer", "n_layers", "num_layers"} & set(config) else {"num_hidden_layers": 32}
    geometry = ModelGeometry.from_config({"vocab_size": 1000, **base, **config})
    first = geometry.layers[0]
    assert (first.kv_heads, first.key_dim, first.value_dim) == layer
    assert len(geometry.layers) == count


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "ffff"),
        ({"model_type": "mistral", "sliding_window": 16}, "ssss"),
        ({"model_type": "mistral", "sliding_window": None}, "ssss"),  # the class's 4096
        ({"model_type": "qwen2", "sliding_window": 16}, "ffff"),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, "fsss"),
        ({"model_type": "gemma2", "sliding_window": 16}, "sfsf"),
        ({"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 3}, "ssfs"),
        ({"model_type": "cohere2", "sliding_window": 16}, "sssf"),
        ({"model_type": "dots1", "sliding_window": 16, "max_window_layers": 3}, "fffs"),
        ({"model_type": "laguna", "sliding_window": 16}, "ffff"),
        ({"model_type": "glm_moe_dsa", "layer_types": ["indexed_attention"] * 4}, "ffff"),
        ({"model_type": "nemotron_h", "num_hidden_layers": None, "layers_block_type": ["mamba", "mlp"]}, "ln"),
        ({"model_type": "exaone4", "sliding_window": 16, "sliding_window_pattern": "LLG"}, "ssfs"),
        ({"model_type": "gpt_oss", "sliding_window": 16}, "sfsf"),
        ({"model_type": "llama4_text", "attention_chunk_size": 16}, "cccf"),
        ({"model_type": "llama4_text", "attention_chunk_size": 16, "no_rope_layers": [0, 1, 1, 0]}, "fccf"),
        (
            {"model_type": "llama", "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"] * 2},
            "fsfs",
        ),
        ({"model_type": "qwen3_next", "full_attention_interval": 2}, "lflf"),
        ({"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 2}, "llfl"),
        ({"model_type": "bamba", "attn_layer_indices": [1]}, "lfll"),
        ({"model_type": "minimax", "attn_type_list": [0, 0, 1, 0]}, "llfl"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*E"}, "lnfn"),
        ({"model_type": "lfm2", "full_attn_idxs": [3]}, "lllf"),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention", "mamba", "mamba"]}, "lfll"),
        (
            {
                "model_type": "gemma3n_text",
                "sliding_window": 16,
                "num_kv_shared_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "sf--",
        ),
        (
            {
                "model_type": "deci",
                "block_configs": [{"attention": {"no_op": True}}, {"attention": {"n_heads_in_group": 4}}] * 2,
                "num_key_value_heads": None,
            },
            "nfnf",
        ),
    ],
)
def test_which_layer_keeps_what(changes: dict[str, Any], expected: str) -> None:
    geometry = of(**changes)
    assert kinds(geometry) == expected
    assert all(layer.window for layer in geometry.layers if layer.keeps in (Keeps.SLIDING, Keeps.CHUNKED))


def test_shared_layers_name_their_source() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    geometry = of(model_type="gemma3n_text", sliding_window=16, num_kv_shared_layers=2, layer_types=types)
    assert [layer.source for layer in geometry.layers] == [None, None, 0, 1]


def test_both_in_one_layer() -> None:
    geometry = of(model_type="falcon_h1", mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16)
    assert all(layer.kv_heads == 2 and layer.state is not None for layer in geometry.layers)


def test_nested_language_part_takes_the_class_defaults() -> None:
    """gemma-3-4b-it's own text_config names neither heads nor head_dim."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    geometry = ModelGeometry.from_config(
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    )
    assert len(geometry.layers) == 34
    assert (geometry.layers[0].kv_heads, geometry.layers[0].key_dim, geometry.layers[0].window) == (4, 256, 1024)
    assert geometry.assumed["num_key_value_heads"] == 4
    assert kinds(geometry)[:6] == "sssssf"
    deeper = ModelGeometry.from_config({"model_type": "qwen2_5_omni", "thinker_config": {"text_config": LLAMA}})
    assert deeper.layers == of().layers


def test_sinks_take_no_room() -> None:
    plain, sinks = of(), of(model_type="gpt_oss", head_dim=8, layer_types=["full_attention"] * 4)
    assert all(layer.sink for layer in sinks.layers)
    assert sinks.bytes_per_token() == plain.bytes_per_token()


def test_state_shapes_are_divided_and_groups_replicated() -> None:
    state = RecurrentState("mamba2", 64, 64, 128, conv_channels=4096, conv_kernel=4, groups=8, state_bytes=4)
    assert state.shapes() == ((3, 6144), (64, 64, 128))
    assert state.shapes(8) == ((3, 768), (8, 64, 128))
    assert state.shapes(16) == ((3, (4096 + 2 * 16 * 128) // 16), (4, 64, 128))
    assert state.bytes() == 3 * 6144 * 2 + 64 * 64 * 128 * 4


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, (512, None)),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, (2048, None)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, (512, None)),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}, "original_max_position_embeddings": 128},
            (512, 128),
        ),
        ({"model_max_length": 9000}, (9000, None)),
        ({"seq_length": 100}, (100, None)),
    ],
)
def test_context(rope: dict[str, Any], expected: tuple[int, int | None]) -> None:
    geometry = of(**rope)
    assert (geometry.max_position, geometry.trained_position) == expected


def test_unknown_architecture_is_refused_by_name_with_what_it_would_need() -> None:
    config = {**LLAMA, "model_type": "thinkomat", "architectures": ["ThinkomatForCausalLM"]}
    del config["num_key_value_heads"]
    with pytest.raises(
        UnsupportedModel, match=r"ThinkomatForCausalLM.*num_key_value_heads.*--assume-full-attention"
    ) as caught:
        ModelGeometry.from_config(config)
    assert caught.value.exit_code == 2
    assumed = ModelGeometry.from_config(config, assume_full_attention=True)
    assert assumed.assumed_full_attention
    assert kinds(assumed) == "ffff"
    assert not ModelGeometry.from_config(LLAMA, assume_full_attention=True).assumed_full_attention


@settings(max_examples=200, deadline=None)
@given(
    layers=st.integers(1, 40),
    kv_heads=st.integers(1, 8),
    head_dim=st.sampled_from([32, 64, 128]),
    tokens=st.integers(1, 100_000),
    more=st.integers(1, 1000),
    window=st.none() | st.integers(1, 5000),
)
def test_bytes_are_monotone_and_never_above_the_naive_formula(
    layers: int, kv_heads: int, head_dim: int, tokens: int, more: int, window: int | None
) -> None:
    config = {
        **LLAMA,
        "model_type": "mistral",
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * 2,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "sliding_window": window,
        "layer_types": ["full_attention" if window is None else "sliding_attention"] * layers,
    }
    geometry = ModelGeometry.from_config(config)
    naive = 2 * layers * kv_heads * head_dim * 2 * tokens
    size = geometry.sequence_bytes(tokens)
    assert size <= geometry.sequence_bytes(tokens + more)
    assert size <= naive
    assert (size == naive) == (window is None or tokens <= window)
    wider = ModelGeometry.from_config(
        {**config, "num_hidden_layers": layers + 1, "layer_types": [*config["layer_types"], "full_attention"]}
    )
    assert wider.sequence_bytes(tokens) > size


def test_heads_that_differ_by_layer() -> None:
    """DeciLM names KV heads layer by layer; without reading them every layer would keep all eight."""
    geometry = of(model_type="deci", num_key_value_heads=None, num_key_value_heads_per_layer=[4, 4, 2, 1])
    assert [layer.kv_heads for layer in geometry.layers] == [4, 4, 2, 1]
    with pytest.raises(CorruptModel, match="8 query heads are not divisible by 3 KV heads"):
        of(model_type="deci", num_key_value_heads_per_layer=[4, 4, 3, 1])


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"model_type": "gpt_bigcode", "n_positions": 8192}, 8192),
        ({"model_type": "dbrx", "max_seq_len": 32768}, 32768),
        ({"model_type": "gpt_bigcode"}, 1024),
        ({"n_positions": 4096, "max_position_embeddings": 2048}, 2048),
    ],
)
def test_a_length_in_the_config_beats_that_of_the_class(config: dict[str, Any], limit: int) -> None:
    assert of(**{"max_position_embeddings": None} | config).max_position == limit


def test_bloom_spells_its_width_n_embed() -> None:
    assert of(model_type="bloom", hidden_size=None, n_embed=64).hidden_size == 64


def test_an_empty_list_of_flags_is_the_pattern_of_the_class() -> None:
    assert kinds(of(model_type="llama4_text", no_rope_layers=[], attention_chunk_size=64)) == "cccf"


def test_widths_that_mean_something_else() -> None:
    """Qwen 1 names two halves as one, LFM2 adjusts the width it names; published: 7.72 and 1.17 billion."""
    qwen = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 151936}
    first = of(model_type="qwen", intermediate_size=22016, num_key_value_heads=32, tie_word_embeddings=False, **qwen)
    assert first.parameters is not None
    assert round(first.parameters.total / 1e9, 2) == 7.72
    lfm = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "vocab_size": 65536}
    wide = {"block_ff_dim": 12288, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256}
    second = of(model_type="lfm2", full_attn_idxs=[2, 5, 8, 10, 12, 14], num_key_value_heads=8, **lfm, **wide)
    assert second.parameters is not None
    assert round(second.parameters.total / 1e9, 2) == 1.17
