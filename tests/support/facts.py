"""tests/data/kv_facts.json: what real models keep, and what vLLM 0.32's own code made of 16 GiB (or more) for them.

The config keys that decide a cache, as published; the numbers as computed by that code (its model class on the
meta device, its grouping, its capacity), so they are independent of ours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "data" / "kv_facts.json"


@dataclass(frozen=True, slots=True)
class Row:
    """vLLM's figures for one setting."""

    device: str
    tp: int
    kv_cache_dtype: str
    prefix_caching: str
    max_model_len: int
    max_num_batched_tokens: int | None
    num_blocks: int
    block_bytes: int
    block_size: int
    tokens: int
    reuse_step: int
    request_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Fact:
    """One model."""

    model: str
    config: dict[str, Any]
    bytes_per_token: float
    state_bytes: int
    context: int
    rows: tuple[Row, ...]


@cache
def facts() -> tuple[Fact, ...]:
    """All models of the table."""
    return tuple(
        Fact(
            item["model"],
            item["config"],
            item["bytes_per_token"],
            item["state_bytes"],
            item["context"],
            tuple(Row(*row) for row in item["vllm"]),
        )
        for item in json.loads(_FILE.read_text(encoding="utf-8"))
    )
