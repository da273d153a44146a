from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, currently_in_test_context, given
from hypothesis import strategies as st

from anaphora.engine.params import SamplingParams, TokenLogprob
from anaphora.engine.sampler import SampleFailure, SampleRow, sample, uniform

NEAR = 1e-4
"""Draws this close to a border between two tokens are not compared: float32 and float64 may differ there."""


def make_row(
    *, seed: int = 0, prompt: Sequence[int] = (), output: Sequence[int] = (), eos: Sequence[int] = (), **params: Any
) -> SampleRow:
    return SampleRow(SamplingParams(**params), tuple(prompt), tuple(output), seed, frozenset(eos))


def token_of(logits: Sequence[float], row: SampleRow) -> int:
    (token,) = sample(torch.tensor([logits], dtype=torch.float32), [row])
    assert isinstance(token, int)
    return token


def adjusted(logits: Sequence[float], row: SampleRow) -> list[float]:
    """Bias, min_tokens and penalties, token by token, in float64."""
    p, x = row.params, [float(value) for value in logits]
    for token in range(len(x)):
        x[token] += p.logit_bias.get(token, 0.0)
        if len(row.output_ids) < p.min_tokens and (token in row.eos_token_ids or token in p.stop_token_ids):
            x[token] = -math.inf
        if token in row.prompt_ids or token in row.output_ids:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        count = list(row.output_ids).count(token)
        x[token] -= p.presence_penalty * (count > 0) + p.frequency_penalty * count
    return x


def skip_unless(clear: bool) -> None:
    """Leave an example out that float32 and float64 may decide differently."""
    if currently_in_test_context():
        assume(clear)


def kept(logits: Sequence[float], row: SampleRow) -> dict[int, float]:
    """Token -> probability of what temperature, min_p, top_k and top_p leave, by the definitions, in float64."""
    p, x = row.params, adjusted(logits, row)
    z = [(value - max(x)) / p.temperature for value in x]
    weights = {token: math.exp(value) for token, value in enumerate(z)}
    if p.min_p:
        skip_unless(all(abs(w - p.min_p) > NEAR * p.min_p for w in weights.values()))
        weights = {t: w for t, w in weights.items() if w >= p.min_p}
    if p.top_k:
        border = sorted((z[t] for t in weights), reverse=True)[min(p.top_k, len(weights)) - 1]
        skip_unless(all(z[t] == border or abs(z[t] - border) > NEAR for t in weights))
        weights = {t: w for t, w in weights.items() if z[t] >= border}
    if p.top_p < 1:
        order = sorted(weights, key=lambda t: (-z[t], t))
        skip_unless(all(z[a] == z[b] or z[a] - z[b] > NEAR for a, b in itertools.pairwise(order)))
        cumulative = list(itertools.accumulate(weights[t] for t in order))
        skip_unless(all(abs(c / cumulative[-1] - p.top_p) > NEAR for c in cumulative))
        enough = next(i for i, c in enumerate(cumulative) if c / cumulative[-1] >= p.top_p)
        weights = {t: weights[t] for t in sorted(order[: enough + 1])}
    total = sum(weights.values())
    return {t: w / total for t, w in weights.items()}


def expected(logits: Sequence[float], row: SampleRow) -> int:
    """Inverse of the cumulative distribution in order of token id."""
    u, cumulative = uniform(row.seed, len(row.output_ids)), 0.0
    for token, probability in kept(logits, row).items():
        cumulative += probability
        skip_unless(abs(cumulative - u) > NEAR)
        if cumulative > u:
            return token
    raise AssertionError


# Multiples of 1/8 make exact ties likely.
logit_lists = st.lists(st.integers(-80, 80).map(lambda n: n / 8), min_size=2, max_size=12)


@st.composite
def cases(draw: st.DrawFn, /, **params: st.SearchStrategy[Any]) -> tuple[list[float], SampleRow]:
    logits = draw(logit_lists)
    ids = st.lists(st.integers(0, len(logits) - 1), max_size=6)
    values = {name: draw(strategy) for name, strategy in params.items()}
    row = make_row(seed=draw(st.integers(-(2**70), 2**70)), prompt=draw(ids), output=draw(ids), **values)
    return logits, row


temperatures = st.floats(0.1, 3.0)
penalties = st.floats(-2.0, 2.0)


@given(cases(temperature=temperatures))
def test_temperature(case: tuple[list[float], SampleRow]) -> None:
    assert token_of(*case) == expected(*case)


@given(cases(temperature=temperatures, min_p=st.floats(0.001, 1.0)))
def test_min_p(case: tuple[list[float], SampleRow]) -> None:
    assert token_of(*case) == expected(*case)


@given(cases(temperature=st.just(1.0), top_k=st.integers(1, 14)))
def test_top_k_keeps_all_ties_of_the_kth(case: tuple[list[float], SampleRow]) -> None:
    assert token_of(*case) == expected(*case)


@given(cases(temperature=temperatures, top_p=st.floats(0.01, 0.999)))
def test_top_p(case: tuple[list[float], SampleRow]) -> None:
    assert token_of(*case) == expected(*case)


@given(cases(temperature=temperatures, repetition_penalty=st.floats(0.5, 2.0)))
def test_repetition_penalty_over_prompt_and_output(case: tuple[list[float], SampleRow]) -> None:
    assert token_of(*case) == expected(*case)


@given(cases(temperature=temperatures, presence_penalty=penalties, frequency_penalty=penalties))
def test_presence_and_frequency_penalties_over_the_output(case: tuple[list[float], SampleRow]) -> None:
    assert token_of(*case) == expected(*case)


@given(
    cases(
        temperature=st.just(1.0),
        min_p=st.sampled_from([0.0, 0.01]),
        top_k=st.integers(0, 8),
        top_p=st.floats(0.3, 1.0),
        repetition_penalty=st.floats(0.8, 1.5),
        presence_penalty=penalties,
        frequency_penalty=penalties,
        logit_bias=st.dictionaries(st.integers(0, 1), st.floats(-5, 5)),
    )
)
def test_everything_together_in_the_documented_order(case: tuple[list[float], SampleRow]) -> None:
    assert token_of(*case) == expected(*case)


@given(cases(temperature=st.just(0.0), repetition_penalty=st.floats(0.5, 2.0), presence_penalty=penalties))
def test_greedy_after_penalties_takes_the_largest(case: tuple[list[float], SampleRow]) -> None:
    x = adjusted(*case)
    assert x[token_of(*case)] == pytest.approx(max(x), abs=1e-5)


def test_penalties_by_hand() -> None:
    logits = [2.0, 2.1, -1.0, -1.1]
    assert token_of(logits, make_row(temperature=0, repetition_penalty=2.0, prompt=[1])) == 0
    assert token_of([-4.0, -1.0, -1.1], make_row(temperature=0, repetition_penalty=1.2, output=[1])) == 2
    assert token_of(logits, make_row(temperature=0, presence_penalty=0.2, prompt=[1])) == 1  # the prompt does not count
    assert token_of(logits, make_row(temperature=0, presence_penalty=0.2, output=[1])) == 0
    assert token_of(logits, make_row(temperature=0, frequency_penalty=0.06, output=[1])) == 1
    assert token_of(logits, make_row(temperature=0, frequency_penalty=0.06, output=[1, 1])) == 0


def test_ties_go_to_the_lowest_id() -> None:
    logits = [0.0, 3.0, 3.0, 1.0]
    assert token_of(logits, make_row(temperature=0)) == 1
    assert token_of(logits, make_row(temperature=0, logit_bias={3: 2.0})) == 1
    assert all(token_of(logits, make_row(temperature=1, top_p=0.1, seed=seed)) == 1 for seed in range(20))


def test_logit_bias_bans_and_forces() -> None:
    logits = [0.0, 5.0, 1.0]
    assert token_of(logits, make_row(temperature=0, logit_bias={1: -100.0})) == 2
    assert all(token_of(logits, make_row(logit_bias={0: 100.0}, seed=seed)) == 0 for seed in range(20))


def test_min_tokens_masks_eos_and_stop_tokens_until_then() -> None:
    logits = [1.0, 5.0, 4.0]
    params: dict[str, Any] = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (2, 99)}
    assert [token_of(logits, make_row(output=[0] * n, eos=[1], **params)) for n in range(4)] == [0, 0, 1, 1]
    assert token_of(logits, make_row(eos=[1], ignore_eos=True, **params)) == 0


@pytest.mark.parametrize("temperature", [1e-45, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert all(token_of([1.0, 1.01, -1e30], make_row(temperature=temperature, seed=s)) == 1 for s in range(20))


def test_frequencies_follow_the_distribution() -> None:
    logits, draws = [0.0, 1.0, 2.0, -1.0, 0.5], 5000
    rows = [make_row(seed=7, output=[0] * n, temperature=0.7, top_p=0.98) for n in range(draws)]
    counts = Counter(sample(torch.tensor([logits]).expand(draws, -1), rows))
    probabilities = kept(logits, rows[0])
    assert set(counts) == set(probabilities) == {0, 1, 2, 4}
    chi_square = sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in probabilities.items())
    assert chi_square < 25  # 3 degrees of freedom: one in 60,000


def test_uniform_is_fixed_for_ever_and_spread_evenly() -> None:
    assert uniform(42, 0) == 0.8257553219088898
    numbers = np.array([uniform(seed, index) for seed in range(40) for index in range(50)])
    assert len(set(numbers)) == 2000
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.abs(np.histogram(numbers, 10, (0, 1))[0] - 200).max() < 60


@pytest.mark.parametrize("top_p", [0.5, 0.999, 0.9999999])
def test_a_nucleus_wider_than_the_first_look(top_p: float) -> None:
    vocab = 10_000
    logits = np.random.default_rng(0).normal(size=vocab).astype(np.float32)
    weights = np.exp(logits.astype(np.float64) - logits.max())
    order = np.lexsort((np.arange(vocab), -logits))
    cumulative = np.cumsum(weights[order]) / weights.sum()
    nucleus = np.sort(order[: int(np.searchsorted(cumulative, top_p)) + 1])
    cdf = np.cumsum(weights[nucleus]) / weights[nucleus].sum()
    for seed in range(20):
        u = uniform(seed, 0)
        low, high = (int(nucleus[min(int(np.searchsorted(cdf, v)), len(nucleus) - 1)]) for v in (u - 1e-6, u + 1e-6))
        assert low <= token_of(logits.tolist(), make_row(top_p=top_p, seed=seed)) <= high


@pytest.mark.parametrize("seed", range(20))
def test_a_draw_from_a_wide_vocabulary_inverts_the_distribution(seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=3001).astype(np.float32) * 2
    logits[-300:] = -np.inf
    cdf = np.cumsum(np.exp(logits.astype(np.float64)))
    u = uniform(seed, 0)
    low, high = (int(np.searchsorted(cdf, (u + d) * cdf[-1])) for d in (-1e-6, 1e-6))
    assert low <= token_of(logits.tolist(), make_row(seed=seed)) <= high


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53, 1.0])
def test_a_draw_never_takes_a_token_without_probability(u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anaphora.engine.sampler.uniform", lambda seed, index: u)
    for vocab in (3, 600, 1000):
        logits = [-math.inf] * vocab
        logits[1] = 0.1
        assert token_of(logits, make_row()) == 1
        logits[vocab // 2] = 0.2
        assert token_of(logits, make_row()) == (1 if u < 0.4 else vocab // 2)


def varied_rows(vocab: int) -> list[SampleRow]:
    rng = np.random.default_rng(3)
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.05, "temperature": 1.5},
        {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 3},
        {"top_p": 0.8, "top_k": 50, "frequency_penalty": 0.5, "logprobs": 0},
        {"logit_bias": {5: 3.0}, "min_tokens": 30},
    ]
    return [
        make_row(
            seed=int(rng.integers(2**63)),
            prompt=rng.integers(vocab, size=9).tolist(),
            output=rng.integers(vocab, size=n % 5).tolist(),
            eos=[2],
            **options[n % len(options)],
        )
        for n in range(32)
    ]


def test_a_row_does_not_depend_on_the_others() -> None:
    vocab = 3000
    rows = varied_rows(vocab)
    logits = torch.randn(32, vocab, generator=torch.Generator().manual_seed(0)) * 3
    before = logits.clone()
    together = sample(logits, rows)
    assert torch.equal(logits, before)
    assert [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(32)] == together
    order = np.random.default_rng(1).permutation(32)
    shuffled = sample(logits[torch.from_numpy(order)], [rows[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(0)) * 4
    row = make_row(temperature=0.5, top_k=5, logit_bias={7: 50.0}, logprobs=4)
    (result,) = sample(logits, [row])
    assert isinstance(result, TokenLogprob)
    reference = torch.log_softmax(logits[0], dim=-1)
    top = torch.topk(reference, 4)
    assert result.token_id == 7
    assert result.logprob == pytest.approx(float(reference[7]), abs=1e-5)
    assert [t for t, _ in result.top] == top.indices.tolist()
    assert [p for _, p in result.top] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_logprobs_zero_and_more_than_the_vocabulary_and_ties() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0]])
    (none,) = sample(logits, [make_row(temperature=0, logprobs=0)])
    (many,) = sample(logits, [make_row(temperature=0, logprobs=9)])
    assert isinstance(none, TokenLogprob)
    assert isinstance(many, TokenLogprob)
    assert none.top == ()
    assert [t for t, _ in many.top] == [1, 2, 0]
    assert none.logprob == many.top[0][1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[math.nan, 0.0, 9.0], [math.inf, 0.0, 1.0], [-math.inf] * 3])
def test_only_the_row_with_bad_logits_fails(bad: list[float], temperature: float) -> None:
    rows = [make_row(temperature=temperature, top_k=1)] * 3
    first, failure, last = sample(torch.tensor([[0.0, 1.0, 0.0], bad, [0.0, 0.0, 1.0]]), rows)
    assert (first, last) == (1, 2)
    assert isinstance(failure, SampleFailure)
    assert "--dtype float32" in failure.reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_minus_infinity_means_never(temperature: float) -> None:
    for seed in range(20):
        assert token_of([-math.inf, 0.0, -math.inf], make_row(temperature=temperature, seed=seed)) == 1


def test_nothing_left_to_choose_is_a_failure() -> None:
    row = make_row(min_tokens=1, eos=[0], stop_token_ids=(1,))
    (failure,) = sample(torch.tensor([[0.0, 1.0]]), [row])
    assert isinstance(failure, SampleFailure)
    assert "min_tokens" in failure.reason


def test_no_rows() -> None:
    assert sample(torch.empty(0, 8), []) == []
