"""Quantiles, bootstrap intervals and two modes."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.probes.statistics import bootstrap, mad, median, median_interval, quantile, split_modes

FLOATS = st.lists(st.floats(0.001, 1000), min_size=2, max_size=40)


@given(FLOATS)
def test_quantiles_agree_with_the_standard_library(values: list[float]) -> None:
    assert median(values) == pytest.approx(statistics.median(values))
    quarter, _, three = statistics.quantiles(values, n=4, method="inclusive")
    assert quantile(values, 0.25) == pytest.approx(quarter)
    assert quantile(values, 0.75) == pytest.approx(three)
    assert (quantile(values, 0), quantile(values, 1)) == (min(values), max(values))


def test_no_values_have_no_quantile() -> None:
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(200):
        rng = random.Random(seed)
        interval = median_interval([rng.gauss(10, 2) for _ in range(25)], seed=seed, level=0.9)
        covered += interval.low <= 10 <= interval.high
    assert 165 <= covered <= 198  # 0.9 of 200, within three standard deviations and the bootstrap's own bias


def test_ratio_and_seed() -> None:
    above, below = [2.0, 2.1, 1.9, 2.2], [1.0, 1.1, 0.9, 1.0]
    groups = [above, below]
    one, again = (bootstrap(groups, lambda a, b: median(a) / median(b), seed=3) for _ in range(2))
    assert one == again
    assert one.estimate == pytest.approx(2.05)
    assert one.low < 2.05 < one.high


def test_mad_is_the_deviation_of_normal_noise_and_blind_to_outliers() -> None:
    rng = random.Random(1)
    values = [rng.gauss(0, 3) for _ in range(2000)]
    assert mad(values) == pytest.approx(3, rel=0.1)
    assert mad([*values, *[1e9] * 50]) == pytest.approx(3, rel=0.2)


def test_two_modes() -> None:
    modes = split_modes([1.0, 1.1, 0.9, 10.0, 11.0])
    assert modes is not None
    assert (modes.low, modes.high) == ((0.9, 1.0, 1.1), (10.0, 11.0))
    assert 1.1 < modes.threshold < 10
    lonely = split_modes([1.0, 1.1, 3.0, 3.3, 90.0], smallest=2)
    assert lonely is not None
    assert lonely.high == (3.0, 3.3, 90.0)
    assert split_modes([1.0, 1.0]) is None
    assert split_modes([]) is None
    assert split_modes([1.0, 2.0, 3.0], smallest=2) is None
