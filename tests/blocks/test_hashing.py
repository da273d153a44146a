"""Hashes are stable over machines and releases, chained, and different wherever anything differs."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from anaphora.blocks.hashing import HashChain, Namespace
from anaphora.errors import InvalidRequest

NAMESPACE = Namespace("weights", "bfloat16", "layout", "tokenizer", cache_salt="tenant")


def hashes(key: bytes, block_size: int, tokens: list[int]) -> list[str]:
    chain = HashChain(key, block_size)
    chain.extend(tokens)
    return [digest.hex() for digest in chain.hashes]


def test_golden_vectors() -> None:
    assert NAMESPACE.key.hex() == "332eceea6c5e72876f9d737fb293cd99879349e1cbe6b6f826c266f53514fe77"
    chain = HashChain(NAMESPACE.key, 4)
    assert chain.root.hex() == "a2847f61390cdde4ee5bd7b4805a7dbe"
    assert hashes(NAMESPACE.key, 4, [1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 9]) == [
        "c4fa6aab9724997edba3de9551b17074",
        "68de438d5bb7b2d0cb6e39e7d8d74d0a",
    ]


def test_every_field_of_the_namespace_changes_the_key() -> None:
    keys = {replace(NAMESPACE, **{field.name: "other"}).key for field in fields(NAMESPACE)} | {NAMESPACE.key}
    assert len(keys) == len(fields(NAMESPACE)) + 1


def test_fields_cannot_flow_into_each_other() -> None:
    assert Namespace("ab", "c", "", "").key != Namespace("a", "bc", "", "").key
    assert Namespace("", "", "", "", adapter="x").key != Namespace("", "", "", "", cache_salt="x").key


def test_a_salt_may_hold_what_json_may_hold() -> None:
    assert replace(NAMESPACE, cache_salt="\ud800").key != replace(NAMESPACE, cache_salt="\ud801").key


def test_extending_bit_by_bit_equals_extending_at_once() -> None:
    tokens = list(range(23))
    chain = HashChain(NAMESPACE.key, 3)
    for end in range(len(tokens) + 1):
        chain.extend(tokens[:end])
        assert len(chain.hashes) == len(chain.packed) == end // 3
    assert [digest.hex() for digest in chain.hashes] == hashes(NAMESPACE.key, 3, tokens)


def test_a_hash_covers_everything_before_it() -> None:
    plain = hashes(NAMESPACE.key, 2, [1, 2, 3, 4, 5, 6])
    changed = hashes(NAMESPACE.key, 2, [1, 2, 9, 4, 5, 6])
    assert [a == b for a, b in zip(plain, changed, strict=True)] == [True, False, False]


def test_salt_and_block_size_have_their_own_roots() -> None:
    other = replace(NAMESPACE, cache_salt="another").key
    roots = {HashChain(key, size).root for key in (NAMESPACE.key, other) for size in (1, 16)}
    assert len(roots) == 4
    assert not set(hashes(NAMESPACE.key, 2, [1, 2, 3, 4])) & set(hashes(other, 2, [1, 2, 3, 4]))


@pytest.mark.parametrize("wrong", [-1, 2**32, 1.5])
def test_what_is_no_token_id_is_refused_and_changes_nothing(wrong: int) -> None:
    chain = HashChain(NAMESPACE.key, 2)
    chain.extend([1, 2])
    with pytest.raises(InvalidRequest, match="is not a token id"):
        chain.extend([1, 2, 3, wrong])
    assert len(chain.hashes) == len(chain.packed) == 1
