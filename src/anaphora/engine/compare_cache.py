"""Greedy generation with no cache at all and with the cache: what each computes, measured.

Both runs make the same number of new tokens and end with every new token computed, as a chat would go on
from there. Without a cache each new token costs one pass over the whole sequence so far, itself included:

    prompt 1000, 200 new tokens:   1001 + 1002 + ... + 1200 = 220,100 token computations
    with prefill and decode:       1000 + 200               =   1,200

The uncached run needs one more pass over the prompt to learn the first new token; it is counted apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anaphora.engine.batch import Batch, BatchRow
from anaphora.engine.runner import ModelRunner
from anaphora.geometry.layout import CacheLayout
from anaphora.types import RequestId

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Run:
    """One way of generating. Tokens computed are counted where the model is called."""

    token_ids: tuple[int, ...]
    prompt_pass_tokens: int
    new_token_tokens: int
    seconds: float


def without_cache(
    runner: ModelRunner, layout: CacheLayout, prompt: Sequence[int], new_tokens: int, progress: Progress
) -> Run:
    """Every pass starts at position 0 and reads nothing an earlier pass wrote. State changes: the storage."""
    tokens = list(prompt)
    began = time.monotonic()
    counted: list[int] = []
    for _ in range(new_tokens):
        tokens.append(_pass(runner, layout, tokens, 0, counted))
        progress(1)
    _pass(runner, layout, tokens, 0, counted)  # computes the last new token
    return Run(tuple(tokens[len(prompt) :]), counted[0], sum(counted[1:]), time.monotonic() - began)


def with_cache(
    runner: ModelRunner, layout: CacheLayout, prompt: Sequence[int], new_tokens: int, progress: Progress
) -> Run:
    """Prefill once, then one token per pass. State changes: the storage."""
    tokens = list(prompt)
    began = time.monotonic()
    counted: list[int] = []
    computed = 0
    for _ in range(new_tokens):
        token = _pass(runner, layout, tokens, computed, counted)
        computed = len(tokens)
        tokens.append(token)
        progress(1)
    _pass(runner, layout, tokens, computed, counted)
    return Run(tuple(tokens[len(prompt) :]), counted[0], sum(counted[1:]), time.monotonic() - began)


def _pass(runner: ModelRunner, layout: CacheLayout, tokens: Sequence[int], start: int, counted: list[int]) -> int:
    """Compute tokens[start:] in one pass over blocks 0, 1, 2 ...; -> the likeliest next token."""
    per_group = -(-len(tokens) // layout.block_size)
    tables = tuple(tuple(range(g * per_group, (g + 1) * per_group)) for g in range(len(layout.groups)))
    row = BatchRow(RequestId("compare"), tuple(tokens[start:]), start, tables, sample=True)
    batch = Batch((row,))
    counted.append(batch.num_tokens)
    return int(runner.execute(batch)[0].argmax())
