"""The fast optimum is the best of all evictions, and no policy is above it."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.blocks.eviction import POLICIES, make_policy
from anaphora.replay.optimum import next_uses, optimum
from anaphora.replay.simulator import PoolReplay
from anaphora.replay.synthetic import GENERATORS

TINY = st.lists(st.text("ab", min_size=1, max_size=3), max_size=7)


def named(prompt: str) -> list[str]:
    return [prompt[: i + 1] for i in range(len(prompt))]


def best_of_all(prompts: list[str], num_blocks: int) -> int:
    """Try every prefix-closed set that a pool could be left with after every prompt."""
    best: dict[frozenset[str], int] = {frozenset(): 0}
    for prompt in prompts:
        path = named(prompt)[:num_blocks]
        after: dict[frozenset[str], int] = {}
        for cached, hits in best.items():
            now = hits + sum(block in cached for block in path)
            others = cached - set(path)
            for count in range(min(len(others), num_blocks - len(path)) + 1):
                for kept in combinations(sorted(others), count):
                    state = frozenset(kept) | set(path)
                    if all(len(block) == 1 or block[:-1] in state for block in state):
                        after[state] = max(after.get(state, 0), now)
        best = after
    return max(best.values())


@settings(deadline=None, max_examples=150)
@given(prompts=TINY, num_blocks=st.integers(1, 6))
def test_equals_brute_force(prompts: list[str], num_blocks: int) -> None:
    assert optimum([named(prompt) for prompt in prompts], num_blocks) == best_of_all(prompts, num_blocks)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["loop", "chat", "zipf"])
def test_no_policy_is_above_it(name: str, policy: str) -> None:
    requests = list(GENERATORS[name](400, 2))
    best = optimum([request.hash_ids or () for request in requests], 600)
    cache = PoolReplay(600, make_policy(policy))
    assert sum(cache.request(request.blocks(512))[0] for request in requests) <= best


def test_next_uses_are_shared_by_all_sizes() -> None:
    prompts = [named("ab"), named("b"), named("ac"), named("ab")]
    uses = next_uses(prompts)
    assert uses[0] == [2, 3]
    assert [optimum(prompts, size, uses) for size in (1, 2, 3, 4)] == [1, 2, 3, 3]
