"""Every family the compact decoder knows, on tiny random models: the same greedy tokens as transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from anaphora.engine.backend import Backend
from anaphora.engine.batch import Batch, BatchRow
from anaphora.engine.models.load import load_model
from anaphora.engine.runner import ModelRunner
from anaphora.geometry.layout import CacheLayout
from anaphora.geometry.model import ModelGeometry
from anaphora.types import RequestId
from support.storage import BACKENDS, make_storage, runner_of

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = 8
PROMPT, NEW = 23, 21

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 5.0],
    "original_max_position_embeddings": 64,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}}),
    "llama-3.1": (
        "Llama",
        {"rope_parameters": {**LLAMA3, "rope_theta": 500.0, "original_max_position_embeddings": 24}},
    ),
    "llama-yarn": ("Llama", {"rope_parameters": {**YARN, "rope_theta": 500.0}}),
    "llama-yarn-mscale": (
        "Llama",
        {"rope_parameters": {**YARN, "rope_theta": 500.0, "mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False}},
    ),
    "smollm3": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.5,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "num_hidden_layers": 7,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 9,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            },
        },
    ),
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": WINDOW}),
    "phi3-longrope": (
        "Phi3",
        {
            "rope_parameters": {**LONG, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 64,
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 1.7,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.21,
        },
    ),
    "olmo2": ("Olmo2", {}),
}


def save(name: str, overrides: dict[str, Any], folder: Path) -> Any:
    """A random model, its norms and biases no longer ones and zeros, saved to `folder`."""
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **overrides})
    architecture = "Gemma3ForCausalLM" if name == "Gemma3Text" else f"{name}ForCausalLM"
    torch.manual_seed(7)
    model = getattr(transformers, architecture)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
    model.save_pretrained(folder)
    return model


def load(
    folder: Path,
    max_model_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    backend: Backend = "torch",
) -> tuple[ModelRunner, CacheLayout]:
    config = json.loads((folder / "config.json").read_text())
    geometry = ModelGeometry.from_config(config)
    loaded = load_model(
        folder,
        config,
        geometry,
        dtype=dtype,
        device=torch.device("cpu"),
        implementation="compact",
        backend=backend,
        max_model_len=max_model_len,
    )
    assert loaded.implementation == "compact"
    layout = CacheLayout.of(geometry, block_size=16 if backend == "native" else 4)
    storage = make_storage(layout, 64 * len(layout.groups), str(dtype).removeprefix("torch."), nan=True)
    return runner_of(loaded, storage), layout


def row(tokens: list[int], start: int, layout: CacheLayout, place: int = 0) -> BatchRow:
    """A row over blocks dealt out backwards; each group and each `place` has its own 24."""
    blocks = -(-(start + len(tokens)) // layout.block_size)
    tables = tuple(
        tuple(24 * (place * len(layout.groups) + group) + 23 - block for block in range(blocks))
        for group in range(len(layout.groups))
    )
    return BatchRow(RequestId(str(place)), tuple(tokens), start, tables, sample=True)


def greedy(runner: ModelRunner, layout: CacheLayout, prompt: list[int], new: int) -> tuple[list[int], torch.Tensor]:
    """Prefill in odd chunks, then decode: (tokens, the logits each was chosen from)."""
    tokens, all_logits = list(prompt), []
    start = 0
    for count in (5, 1, 7, len(prompt)):
        chunk = prompt[start : start + count]
        logits = runner.execute(Batch((row(chunk, start, layout),)))
        start += len(chunk)
    for _ in range(new):
        all_logits.append(logits[0])
        tokens.append(int(logits[0].argmax()))
        logits = runner.execute(Batch((row(tokens[-1:], len(tokens) - 1, layout),)))
    return tokens[len(prompt) :], torch.stack(all_logits)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers(case: str, backend: Backend, tmp_path: Path) -> None:
    model = save(*CASES[case], tmp_path)
    prompt = torch.randint(0, SIZES["vocab_size"], (PROMPT,), generator=torch.Generator().manual_seed(3)).tolist()
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, PROMPT, dtype=torch.long),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    runner, layout = load(tmp_path, max_model_len=48 if "longrope" in case else None, backend=backend)
    tokens, logits = greedy(runner, layout, prompt, NEW)
    wanted = torch.cat(output.logits)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    assert tokens == output.sequences[0, PROMPT:].tolist()
    assert len(set(tokens)) > 1, "a model that repeats itself proves nothing"


@pytest.mark.parametrize("case", ["llama", "gemma2", "olmo2"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(case: str, tmp_path: Path) -> None:
    model = save(*CASES[case], tmp_path)
    prompt = list(range(3, 40))
    exact = model(torch.tensor([prompt])).logits[0, -1].detach()
    theirs = model.to(torch.bfloat16)(torch.tensor([prompt])).logits[0, -1].detach()
    runner, layout = load(tmp_path, dtype=torch.bfloat16)
    ours = runner.execute(Batch((row(prompt, 0, layout),)))[0]
    assert ours.dtype == torch.float32
    assert 0.0 < float((ours - exact).abs().max()) < 2 * float((theirs - exact).abs().max())


def test_longrope_takes_the_long_factors_for_a_long_context(tmp_path: Path) -> None:
    """A prompt beyond the original context: transformers turns all of it by the long factors, and so do we."""
    model = save(*CASES["phi3-longrope"], tmp_path)
    prompt = torch.randint(0, SIZES["vocab_size"], (70,), generator=torch.Generator().manual_seed(3))
    wanted = model(prompt[None]).logits[0, -1]
    runner, layout = load(tmp_path)
    logits = runner.execute(Batch((row(prompt.tolist(), 0, layout, place=0),)))[0]
    torch.testing.assert_close(logits, wanted.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda full, local: {"rope_theta": full["rope_theta"], "rope_local_base_freq": local["rope_theta"]},
        lambda full, local: {
            "rope_theta": full["rope_theta"],
            "rope_local_base_freq": local["rope_theta"],
            "rope_scaling": {"rope_type": "linear", "factor": full["factor"]},
        },
    ],
)
def test_gemma3_reads_the_older_rope_keys(
    rewrite: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    save(*CASES["gemma3"], tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    ropes = config.pop("rope_parameters")
    config |= rewrite(ropes["full_attention"], ropes["sliding_attention"])
    path.write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    runner, layout = load(tmp_path)
    prompt = list(range(1, 40))
    logits = runner.execute(Batch((row(prompt, 0, layout),)))[0]
    torch.testing.assert_close(logits, model(torch.tensor([prompt])).logits[0, -1].detach(), rtol=1e-4, atol=1e-4)


def test_language_model_inside_a_multimodal_one(tmp_path: Path) -> None:
    """Longer tensor names and a nested text_config: the same logits."""
    from safetensors.torch import load_file, save_file

    model = save(*CASES["llama"], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    runner, layout = load(tmp_path)
    prompt = list(range(1, 20))
    logits = runner.execute(Batch((row(prompt, 0, layout),)))[0]
    torch.testing.assert_close(logits, model(torch.tensor([prompt])).logits[0, -1].detach(), rtol=1e-4, atol=1e-4)
