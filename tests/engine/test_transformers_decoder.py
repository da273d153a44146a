"""Tiny random models of many families: on paged keys and values they say what transformers says, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from anaphora import native
from anaphora.engine.batch import Batch, BatchRow
from anaphora.engine.models.transformers_decoder import TransformersDecoder, load_transformers_decoder
from anaphora.engine.models.transformers_probe import LayerWitness
from anaphora.errors import CorruptModel, UnsupportedModel
from anaphora.geometry.layers import LayerKV
from anaphora.geometry.layout import CacheLayout
from anaphora.geometry.model import ModelGeometry
from anaphora.types import NULL_BLOCK, RequestId
from support.storage import make_storage, native_runner, torch_runner

VOCAB = 96
NEW_TOKENS = 8
WINDOW = 5
BLOCK_SIZES = {"torch": 4, "native": 16}
CPU = torch.device("cpu")

PLAIN: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**PLAIN, "num_key_value_heads": 2}
GPT: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL_EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5, 1.0, 2.0],
    "long_factor": [2.0, 5.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("afmoe", {**EXPERTS, "head_dim": 8, "sliding_window": WINDOW, "num_dense_layers": 1}),
    "apertus": ("apertus", GROUPED),
    "arcee": ("arcee", GROUPED),
    "biogpt": ("biogpt", PLAIN),
    "bitnet": ("bitnet", GROUPED),
    "codegen": ("codegen", {**GPT, "rotary_dim": 4}),
    "cohere": ("cohere", {**GROUPED, "logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**GROUPED, "sliding_window": WINDOW, "layer_types": MIXED}),
    "ctrl": ("ctrl", {**GPT, "dff": 48}),
    "ernie4_5": ("ernie4_5", {**GROUPED, "head_dim": 8}),
    "ernie4_5_moe": ("ernie4_5_moe", {**GROUPED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}),
    "exaone4": ("exaone4", {**GROUPED, "sliding_window": WINDOW, "layer_types": MIXED}),
    "flex_olmo": ("flex_olmo", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("gemma", {**GROUPED, "head_dim": 16}),
    "gemma2": (
        "gemma2",
        {
            **GROUPED,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.5,
        },
    ),
    "gemma3": ("gemma3_text", {**GROUPED, "head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED}),
    "glm": ("glm", {**GROUPED, "head_dim": 8}),
    "glm4": ("glm4", {**GROUPED, "head_dim": 8}),
    "gpt2": ("gpt2", GPT),
    "gpt2 scaled by layer": ("gpt2", {**GPT, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode": ("gpt_bigcode", GPT),
    "gpt_bigcode multi-head": ("gpt_bigcode", {**GPT, "multi_query": False}),
    "gpt_neox": ("gpt_neox", PLAIN),
    "gpt_neox sequential": ("gpt_neox", {**PLAIN, "use_parallel_residual": False}),
    "gpt_oss": (
        "gpt_oss",
        {**LOCAL_EXPERTS, "head_dim": 8, "sliding_window": WINDOW, "layer_types": MIXED, "rope_parameters": YARN},
    ),
    "gptj": ("gptj", {**GPT, "rotary_dim": 4}),
    "granite": ("granite", {**GROUPED, "attention_multiplier": 0.2, "logits_scaling": 1.7, "residual_multiplier": 0.6}),
    "granitemoe": ("granitemoe", LOCAL_EXPERTS),
    "granitemoeshared": ("granitemoeshared", {**LOCAL_EXPERTS, "shared_intermediate_size": 16}),
    "helium": ("helium", {**GROUPED, "head_dim": 8}),
    "hunyuan": ("hunyuan_v1_dense", {**GROUPED, "head_dim": 8}),
    "jais2": ("jais2", GROUPED),
    "llama": ("llama", GROUPED),
    "llama dynamic": (
        "llama",
        {**GROUPED, "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 99.0}},
    ),
    "llama yarn": ("llama", {**GROUPED, "rope_parameters": YARN}),
    "minimax_m2": ("minimax_m2", {**LOCAL_EXPERTS, "head_dim": 8}),
    "mistral window": ("mistral", {**GROUPED, "sliding_window": WINDOW}),
    "mixtral": ("mixtral", LOCAL_EXPERTS),
    "mixtral window": ("mixtral", {**LOCAL_EXPERTS, "sliding_window": WINDOW}),
    "nanochat": ("nanochat", {**GROUPED, "final_logit_softcapping": 2.0}),
    "nemotron": ("nemotron", GROUPED),
    "olmo": ("olmo", {**GROUPED, "clip_qkv": 1.0}),
    "olmo2": ("olmo2", GROUPED),
    "olmo3": ("olmo3", {**GROUPED, "sliding_window": WINDOW, "layer_types": MIXED}),
    "olmoe": ("olmoe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "opt": ("opt", {**PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt projected": ("opt", {**PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "persimmon": ("persimmon", PLAIN),
    "phi": ("phi", {**GROUPED, "qk_layernorm": True}),
    "phi3 window": ("phi3", {**GROUPED, "sliding_window": WINDOW}),
    "phi3 longrope": ("phi3", {**GROUPED, "original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
    "phimoe": ("phimoe", LOCAL_EXPERTS),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 8}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 8}),
    "seed_oss": ("seed_oss", {**GROUPED, "head_dim": 8}),
    "smollm3": ("smollm3", {**GROUPED, "no_rope_layers": [1, 0, 1]}),
    "stablelm": ("stablelm", {**GROUPED, "use_qkv_bias": True}),
    "stablelm parallel": ("stablelm", {**GROUPED, "use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder2": ("starcoder2", GROUPED),
    "starcoder2 window": ("starcoder2", {**GROUPED, "sliding_window": WINDOW}),
}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("bert", {**PLAIN, "is_decoder": False}, "later tokens"),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": VOCAB}, "attention interface"),
    "diffllama": ("diffllama", GROUPED, "attended 6 times"),
    "doge": ("doge", GROUPED, "a bias of its own"),
    "falcon": ("falcon", PLAIN, "attention interface"),
    "falcon alibi": ("falcon", {**PLAIN, "alibi": True}, "attention interface"),
    "gpt2 across": ("gpt2", {**GPT, "add_cross_attention": True}, "encoder"),
    "gpt_neo": (
        "gpt_neo",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]], "vocab_size": VOCAB},
        "attention interface",
    ),
    "gpt_neox_japanese": ("gpt_neox_japanese", PLAIN, "attention interface"),
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB}, "state"),
    "mpt": ("mpt", {"d_model": 32, "n_layers": 3, "n_heads": 4, "vocab_size": VOCAB}, "attention interface"),
    "openai-gpt": ("openai-gpt", GPT, "attention interface"),
    "phimoe longrope": (
        "phimoe",
        {
            **LOCAL_EXPERTS,
            "rope_parameters": {**LONGROPE, "short_mscale": 1.0, "long_mscale": 2.0},
        },
        "differ by",
    ),
    "recurrent_gemma": ("recurrent_gemma", GROUPED, "attended 1 times"),
    "zaya": ("zaya", {**EXPERTS, "head_dim": 8, "num_experts_per_tok": 1}, "differ by"),
    "deepseek_v3": ("deepseek_v3", {**GROUPED, "n_routed_experts": 4, "moe_intermediate_size": 16}, "latent"),
    "roberta": ("roberta", {**PLAIN, "is_decoder": True}, "differ by"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small only lose by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save_random(model_type: str, options: dict[str, Any], folder: Path) -> Any:
    """A model whose every weight matters, norms and biases too, saved to `folder` and in evaluation mode."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return model


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[TransformersDecoder, ModelGeometry]:
    """Families that the geometry does not know are taken for full attention, as a user can ask for."""
    config = json.loads((folder / "config.json").read_text())
    geometry = ModelGeometry.from_config(config, assume_full_attention=True)
    return load_transformers_decoder(folder, config, geometry, dtype, CPU, **options), geometry


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Continuation:
    """New tokens and the logits each was the largest of."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


def own_greedy(model: Any, tokens: list[int]) -> Continuation:
    ids = torch.tensor([tokens])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Continuation(out.sequences[0, len(tokens) :].tolist(), [step[0] for step in out.logits])


def paged_greedy(
    decoder: TransformersDecoder,
    geometry: ModelGeometry,
    prompts: Sequence[list[int]],
    chunks: Sequence[int],
    backend: str = "torch",
) -> list[Continuation]:
    """All prompts in one batch, each in chunks of its own size; whatever is not written in the storage is NaN."""
    size = BLOCK_SIZES[backend]
    layout = CacheLayout.of(geometry, size)
    width = -(-(max(map(len, prompts)) + NEW_TOKENS) // size)
    groups = len(layout.groups)
    storage = make_storage(layout, len(prompts) * groups * width, nan=True)
    blocks = torch.randperm(storage.num_blocks, generator=torch.Generator().manual_seed(1)).view(-1, groups, width)
    runner = torch_runner(decoder, storage) if backend == "torch" else native_runner(decoder, storage)
    results = [Continuation() for _ in prompts]
    done = [0] * len(prompts)
    while True:
        rows, sampled = [], []
        for i, result in enumerate(results):
            tokens = prompts[i] + result.tokens
            if len(result.tokens) == NEW_TOKENS:
                continue
            end = min(done[i] + chunks[i], len(tokens))
            tables = []
            for group, table in zip(layout.groups, blocks[i].tolist(), strict=True):
                passed = 0 if group.window is None else max(0, done[i] - group.window + 1) // size
                used = table[: -(-end // size)]
                tables.append(tuple(NULL_BLOCK if b < passed else block for b, block in enumerate(used)))
            sample = end == len(tokens)
            rows.append(BatchRow(RequestId(str(i)), tuple(tokens[done[i] : end]), done[i], tuple(tables), sample))
            sampled += [result] if sample else []
            done[i] = end
        if not rows:
            return results
        for result, logits in zip(sampled, runner.execute(Batch(tuple(rows))), strict=True):
            result.tokens.append(int(logits.argmax()))
            result.logits.append(logits)


def assert_same(results: Sequence[Continuation], expected: Sequence[Continuation]) -> None:
    for result, wanted in zip(results, expected, strict=True):
        assert result.tokens == wanted.tokens
        torch.testing.assert_close(torch.stack(result.logits), torch.stack(wanted.logits), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = save_random(*FAMILIES[family], tmp_path)
    prompts = [prompt(17), prompt(22, seed=1)]
    expected = [own_greedy(model, tokens) for tokens in prompts]

    decoder, geometry = load(tmp_path)
    assert_same(paged_greedy(decoder, geometry, prompts[:1], [5]), expected[:1])
    assert_same(paged_greedy(decoder, geometry, prompts, [7, 3]), expected)
    if native.missing() is None:
        assert_same(paged_greedy(decoder, geometry, prompts, [7, 3], "native"), expected)
    assert decoder.weight_bytes == sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_run_is_refused_by_name_with_the_reason(family: str, tmp_path: Path) -> None:
    model_type, options, reason = REFUSED[family]
    name = type(save_random(model_type, options, tmp_path)).__name__
    with pytest.raises(UnsupportedModel, match=f"(?s)^{name} cannot run here: .*{reason}.* Serve it with"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["gpt_oss", "gptj", "stablelm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_probe(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_random(*FAMILIES[family], tmp_path)
    decoder, _ = load(tmp_path, dtype)
    assert decoder.dtype == dtype


def test_rotary_scaling_is_that_of_the_longest_sequence_to_come(tmp_path: Path) -> None:
    model = save_random(*FAMILIES["phi3 longrope"], tmp_path)
    tokens = prompt(16 - NEW_TOKENS)
    decoder, geometry = load(tmp_path, max_model_len=16)
    assert decoder.scaled_for == 16
    assert_same(paged_greedy(decoder, geometry, [tokens], [3]), [own_greedy(model, tokens)])

    longer, _ = load(tmp_path)
    assert longer.scaled_for == 64
    assert paged_greedy(longer, geometry, [tokens], [3])[0].logits[0].ne(own_greedy(model, tokens).logits[0]).any()


def test_a_window_that_the_config_does_not_name_is_refused(tmp_path: Path) -> None:
    save_random(*FAMILIES["mistral window"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    geometry = ModelGeometry.from_config({**config, "sliding_window": None})
    with pytest.raises(UnsupportedModel, match=r"layer 0 sees 5 tokens in transformers, all tokens by config.json"):
        load_transformers_decoder(tmp_path, config, geometry, torch.float32, CPU)


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "gives its attention position_bias"),
        ({"is_causal": False}, "attends to later tokens"),
        ({"sliding_window": 7}, "sees 7 tokens"),
        ({"sliding_window": None, "dropout": 0.0, "output_router_logits": False}, None),
    ],
)
def test_the_witness_refuses_what_attention_here_does_not_do(keywords: dict[str, Any], reason: str | None) -> None:
    geometry = ModelGeometry("Odd", "odd", (LayerKV(2, 4, 4),), 4, 16, 32, 64)
    witness = LayerWitness(geometry)
    kept = torch.zeros(1, 2, 3, 4)

    def watch() -> None:
        witness.see(SimpleNamespace(layer_idx=0), kept, kept, None, keywords)
        witness.check()

    if reason is None:
        watch()
    else:
        with pytest.raises(UnsupportedModel, match=f"Odd cannot run here: layer 0 {reason}"):
            watch()


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('ran')")
    config = {**GROUPED, "model_type": "own", "auto_map": {"AutoConfig": "modeling_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"own cannot run here: .* never run here"):
        load(tmp_path)


def _drop_a_tensor(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _cut_a_tensor(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:-1].clone()


@pytest.mark.parametrize("damage", [_drop_a_tensor, _cut_a_tensor])
def test_weights_that_do_not_belong_to_the_config_are_refused(
    damage: Callable[[dict[str, Tensor]], None], tmp_path: Path
) -> None:
    save_random(*FAMILIES["llama"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptModel, match=r"(?s)^.*test_weights.*layers.1.mlp.up_proj.weight.*fetch the model again"):
        load(tmp_path)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    save_random(*FAMILIES["llama"], tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptModel, match="cannot be read"):
        load(tmp_path)
