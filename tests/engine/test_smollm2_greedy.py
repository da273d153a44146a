"""The real model through the real engine: greedy tokens equal plain transformers generation, in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anaphora.engine.engine import Engine
from support.engines import GREEDY, make_engine, run_all, tokens_of

NEW_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\n# Compute the mean of each column\n",
    "Q: What is the boiling point of water?\nA:",
    "中国的首都是",
    "今天天气很好，我们去公园",
    "El perro corre por el parque porque",
    "La Révolution française a commencé en",
    "Die Hauptstadt von Deutschland ist",
    "Emoji test: 😀 👩‍👩‍👧 🇫🇷 and then",
    "naïve café résumé coöperate",
    "1, 1, 2, 3, 5, 8, 13,",
    "2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    "The quick brown fox",
    "To be, or not to be, that is",
    "SELECT name, COUNT(*) FROM users WHERE",
    '{"name": "Alice", "age": 30, "city":',
    "<html>\n<head>\n<title>",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics are:",
    "Water is made of hydrogen and",
    "In 1969, humans first",
    "A haiku about autumn:\n",
    "Recipe for pancakes:\n1.",
    "Translate to French: good morning ->",
    "List of planets: Mercury, Venus,",
    "The mitochondria is the",
    "If it rains tomorrow, then",
    "aaaaaaaaaaaaaaaaaaaaaaaa",
    " ",
    "\n\n",
    "x",
    "!!!???...",
    "Why did the chicken cross the road?",
    "The Theory of Relativity states that",
    "for i in range(10):\n    print(",
    "#include <stdio.h>\n\nint main(",
    "Summary: The meeting was held on Monday. Action items:",
    "My favourite book is",
    "Привет, как дела?",
    "日本の首都は",
]


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Engine:
    return make_engine(smollm2, kv_memory=512 << 20)


@pytest.fixture(scope="module")
def outputs(engine: Engine) -> list[tuple[list[int], tuple[int, ...]]]:
    """(prompt, 64 greedy tokens) of every prompt, all in one go through the batched engine."""
    prompts = [engine.tokenizer.encode(text) for text in PROMPTS]
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, replace(GREEDY, max_tokens=NEW_TOKENS))
    made = run_all(engine)
    return [(prompt, tokens_of(made[str(i)])) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.model
def test_every_token_is_the_one_transformers_finds_likeliest(
    outputs: list[tuple[list[int], tuple[int, ...]]], reference: Any
) -> None:
    """One plain forward over prompt and output gives transformers' greedy choice after every prefix at once."""
    assert len(outputs) >= 40
    for prompt, tokens in outputs:
        assert len(tokens) == NEW_TOKENS
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
        choices = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert tuple(choices) == tokens, prompt


@pytest.mark.model
def test_generate_of_transformers_gives_the_same_tokens(
    outputs: list[tuple[list[int], tuple[int, ...]]], reference: Any
) -> None:
    for prompt, tokens in outputs[:4]:
        generated = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert tuple(generated[0, len(prompt) :].tolist()) == tokens


@pytest.mark.model
def test_cold_warm_chunked_and_alone_are_the_same(
    engine: Engine, smollm2: Path, outputs: list[tuple[list[int], tuple[int, ...]]]
) -> None:
    """Again from the warm cache, and in another engine: no cache, odd chunks, small blocks."""
    picked = outputs[:10]
    other = make_engine(
        smollm2, kv_memory=64 << 20, enable_prefix_caching=False, block_size=4, max_num_seqs=3, max_num_batched_tokens=7
    )
    for each in (engine, other):
        for i, (prompt, _) in enumerate(picked):
            each.add(f"again-{i}", prompt, replace(GREEDY, max_tokens=NEW_TOKENS))
        made = run_all(each)
        for i, (_, tokens) in enumerate(picked):
            assert tokens_of(made[f"again-{i}"]) == tokens
    assert engine.stats.prefix_hits > 0
