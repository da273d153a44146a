"""SmolLM2-135M-Instruct in float32: the same greedy tokens as transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from anaphora.engine.batch import Batch, BatchRow
from anaphora.engine.models.load import load_model
from anaphora.geometry.layout import CacheLayout
from anaphora.geometry.model import ModelGeometry
from anaphora.types import RequestId
from support.storage import make_storage, runner_of

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "<|im_start|>user\nWhy is the sky blue? Answer in one sentence.<|im_end|>\n<|im_start|>assistant\n",
]
NEW = 16
BLOCKS = 8
"""Blocks of 16 tokens per prompt."""


@pytest.mark.model
def test_greedy_tokens_equal_transformers(smollm2: Path) -> None:
    """All prompts in one batch, prefilled in chunks of different length, then decoded together."""
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompts: list[list[int]] = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False
        )
        wanted.append(output[0, len(prompt) :].tolist())
    del model

    config = json.loads((smollm2 / "config.json").read_text())
    geometry = ModelGeometry.from_config(config)
    loaded = load_model(
        smollm2, config, geometry, dtype=torch.float32, device=torch.device("cpu"), implementation="auto"
    )
    assert loaded.implementation == "compact"
    layout = CacheLayout.of(geometry, 16)
    storage = make_storage(layout, BLOCKS * len(prompts))
    runner = runner_of(loaded, storage)

    tokens = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    while any(len(all_) - len(prompt) < NEW for all_, prompt in zip(tokens, prompts, strict=True)):
        rows = []
        for index, (all_, start) in enumerate(zip(tokens, computed, strict=True)):
            end = min(len(all_), start + 3 + 4 * index)
            table = tuple(range(BLOCKS * index, BLOCKS * index + -(-end // 16)))
            rows.append(BatchRow(RequestId(str(index)), tuple(all_[start:end]), start, (table,), end == len(all_)))
            computed[index] = end
        logits = iter(runner.execute(Batch(tuple(rows))))
        for index, one in enumerate(rows):
            if one.sample:
                tokens[index].append(int(next(logits).argmax()))
    made = [all_[len(prompt) :][:NEW] for all_, prompt in zip(tokens, prompts, strict=True)]
    assert made == wanted
