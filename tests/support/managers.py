"""Requests of a KVCacheManager, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from anaphora.blocks.hashing import HashChain
from anaphora.blocks.manager import BlockTable, KVCacheManager, PrefixMatch
from anaphora.types import BlockCopy

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def match(kv: KVCacheManager, tokens: Sequence[int], max_tokens: int | None = None, key: bytes = KEY) -> PrefixMatch:
    limit = len(tokens) if max_tokens is None else max_tokens
    return kv.match_prefix(tokens, HashChain(key, kv.block_size), limit)


def start(kv: KVCacheManager, tokens: Sequence[int], key: bytes = KEY) -> tuple[BlockTable, HashChain, list[BlockCopy]]:
    """Open on the longest match and compute the rest in one step, not committed."""
    chain = HashChain(key, kv.block_size)
    table, copies = kv.open(kv.match_prefix(tokens, chain, len(tokens)))
    kv.reserve(table, len(tokens))
    return table, chain, copies


def run(kv: KVCacheManager, tokens: Sequence[int], key: bytes = KEY) -> None:
    """One request from start to end."""
    table, chain, copies = start(kv, tokens, key)
    kv.release_copies(copies)
    kv.commit(table, tokens, chain, len(tokens))
    kv.slide(table, len(tokens))
    kv.close(table, tokens, chain, len(tokens))
    kv.check_invariants()
