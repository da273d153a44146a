"""Prompts of the lengths asked for, new each time, with a trace's shared prefixes."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from anaphora.errors import ConfigError
from anaphora.probes.verify.prompts import QUESTION_WORDS, Scale
from anaphora.probes.workload import (
    Fitting,
    Job,
    Lengths,
    SyntheticWorkload,
    TraceRow,
    TraceWorkload,
    Workload,
)

SCALE = Scale(1.25, 10.0, "usage")
"""A server that makes five tokens of four words, and ten of its template."""


def words(job: Job) -> list[str]:
    return str(job.messages[0]["content"]).split()


def tokens(job: Job) -> float:
    return SCALE.head + SCALE.per_word * (len(words(job)) - QUESTION_WORDS)  # the head has an ending in it


def take(workload: Workload, count: int) -> list[Job]:
    return list(islice(workload.jobs(), count))


def common(a: list[str], b: list[str]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize(
    ("text", "low", "high", "middle"),
    [
        ("512", 512, 512, 512),
        ("uniform:100-300", 100, 300, 200),
        ("normal:400,50", 150, 650, 400),
        ("lognormal:400,0.5", 20, 8000, 400),
    ],
)
def test_lengths_are_drawn_as_said(text: str, low: int, high: int, middle: int) -> None:
    lengths, rng = Lengths.parse(text, "--prompt-tokens"), random.Random(0)
    drawn = sorted(lengths.draw(rng) for _ in range(2000))
    assert low <= drawn[0] <= drawn[-1] <= high
    assert drawn[1000] == pytest.approx(middle, rel=0.06)


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "many", "uniform:9-3", "normal:5", "uniform:1", "lognormal:9,9", "5,6"]
)
def test_other_lengths_are_refused_with_the_option_and_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--output-tokens.*uniform:100-900"):
        Lengths.parse(text, "--output-tokens")


def test_draws_are_at_least_one_token() -> None:
    rng = random.Random(0)
    assert min(Lengths.parse("normal:2,50", "x").draw(rng) for _ in range(200)) == 1


def synthetic(prompt: str = "200", shared: int = 0, seed: int = 1) -> SyntheticWorkload:
    return SyntheticWorkload(Lengths.parse(prompt, ""), Lengths.parse("16", ""), SCALE, shared_prefix=shared, seed=seed)


def test_prompts_have_their_length_in_tokens_of_this_server() -> None:
    for job in take(synthetic("uniform:50-900"), 50):
        assert tokens(job) == pytest.approx(job.prompt_tokens, abs=1)
        assert job.output_tokens == 16


def test_prompts_part_within_their_first_words_and_the_seed_decides() -> None:
    texts = [words(job) for job in take(synthetic(), 200)]
    assert max(common(a, b) for i, a in enumerate(texts) for b in texts[:i]) <= 4
    assert texts == [words(job) for job in take(synthetic(), 200)]
    assert texts[0] != words(take(synthetic(seed=2), 1)[0])


def test_a_shared_prefix_is_shared_and_nothing_else() -> None:
    texts = [words(job) for job in take(synthetic("300", shared=100), 20)]
    shared = [common(texts[0], other) for other in texts[1:]]
    assert min(shared) >= 80  # 100 tokens are 80 words
    assert max(shared) <= 84
    assert tokens(take(synthetic("300", shared=100), 1)[0]) == pytest.approx(300, abs=1)


ROWS = [
    TraceRow(1300, 20, (0, 1, 2)),
    TraceRow(1100, 30, (0, 1, 3)),
    TraceRow(600, 40, (0, 4)),
    TraceRow(700, 50, (5, 6)),
]


def test_a_trace_keeps_lengths_and_shared_blocks() -> None:
    jobs = take(TraceWorkload(ROWS, SCALE, seed=1), 4)
    assert [job.prompt_tokens for job in jobs] == [1300, 1100, 600, 700]
    assert [job.output_tokens for job in jobs] == [20, 30, 40, 50]
    assert [tokens(job) for job in jobs] == pytest.approx([1300, 1100, 600, 700], abs=1)
    a, b, c, d = map(words, jobs)
    block = 512 / SCALE.per_word
    assert common(a, b) == pytest.approx(2 * block, abs=4)
    assert common(a, c) == pytest.approx(block, abs=4)
    assert common(a, d) <= 3


def test_a_scaled_trace_shares_the_same_parts_and_begins_anew_with_other_texts() -> None:
    jobs = take(TraceWorkload(ROWS, SCALE, factor=0.25, seed=1), 8)
    a, b = words(jobs[0]), words(jobs[1])
    assert common(a, b) == pytest.approx(2 * 128 / SCALE.per_word, abs=4)
    assert jobs[0].prompt_tokens == 325
    assert common(a, words(jobs[4])) <= 3
    assert common(words(jobs[4]), words(jobs[5])) == common(a, b)


def test_rows_without_hash_ids_share_nothing() -> None:
    a, b = map(words, take(TraceWorkload([TraceRow(500, 1), TraceRow(500, 1)], SCALE), 2))
    assert common(a, b) <= 4


def test_the_description_says_what_is_asked() -> None:
    assert "200" in synthetic(shared=50).description
    assert "925 prompt" in TraceWorkload(ROWS, SCALE).description


def test_the_size_of_a_block_is_the_trace_s() -> None:
    rows = [TraceRow(160, 1, (0, 1, 2)), TraceRow(160, 1, (0, 1, 3))]
    a, b = map(words, take(TraceWorkload(rows, SCALE, block_size=16), 2))
    assert common(a, b) == pytest.approx(32 / SCALE.per_word, abs=4)


def test_requests_longer_than_the_context_are_left_out_and_counted() -> None:
    jobs = Fitting(TraceWorkload(ROWS, SCALE), 1000)
    assert [next(jobs).prompt_tokens for _ in range(4)] == [600, 700, 600, 700]
    assert jobs.skipped == 4
    with pytest.raises(ConfigError, match="--trace-scale"):
        next(Fitting(TraceWorkload(ROWS, SCALE), 100))
    assert next(Fitting(TraceWorkload(ROWS, SCALE), None)).prompt_tokens == 1300
