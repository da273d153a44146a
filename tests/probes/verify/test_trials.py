"""Prompts nobody can have cached, and the order in which they are sent."""

from __future__ import annotations

import random
from collections import Counter

from anaphora.probes.verify.prompts import WORDS, PromptMaker, Scale, altered, prompt
from anaphora.probes.verify.trials import plan_batch


def test_prompts_come_from_the_seed_and_from_nothing_else() -> None:
    one, same, other = PromptMaker(1), PromptMaker(1), PromptMaker(2)
    first = one.words(50)
    assert first == same.words(50)
    assert one.question() == same.question()
    assert first != other.words(50)
    assert one.words(50) != first
    assert len(set(WORDS)) == len(WORDS)


def test_a_control_differs_in_its_first_character_only() -> None:
    for first in ("Apple", "Zero"):
        words = [first, "tree"]
        text, control = prompt(words, "? sun"), prompt(altered(words), "? sun")
        assert control[0] != text[0]
        assert control[1:] == text[1:]


def test_enough_words_for_the_tokens() -> None:
    for per_word in (0.9, 1.0, 1.37, 5.6):
        scale = Scale(per_word, 10, "usage")
        words = scale.words_for(2000)
        assert scale.tokens_for(words) >= 1999
        assert scale.tokens_for(words - 2) < 2000


def test_batches_are_random_and_keep_the_rules() -> None:
    rng = random.Random(3)
    plans = [plan_batch(4, rng) for _ in range(300)]
    for steps in plans:
        assert sorted(steps) == sorted((kind, n) for kind in ("cold", "warm", "control") for n in (4, 5))
        gaps = []
        for number in (4, 5):
            cold = steps.index(("cold", number))
            assert cold < steps.index(("control", number))
            gaps.append(steps.index(("warm", number)) - cold - 1)
        assert min(gaps) == 0 < max(gaps)
    assert len({tuple(steps) for steps in plans}) > 10
    last = Counter(steps[-1][0] for steps in plans)
    assert last["warm"] > 30
    assert last["control"] > 30
