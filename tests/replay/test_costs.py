"""Quantiles in bounded memory, and the size beyond which more is not worth it."""

from __future__ import annotations

from random import Random

import pytest

from anaphora.replay.costs import Offer, Quantiles, worthwhile


def test_quantiles_are_known_to_two_percent() -> None:
    random, quantiles = Random(1), Quantiles()
    values = sorted(random.lognormvariate(0, 2) for _ in range(20_000))
    for value in values:
        quantiles.add(value)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        assert quantiles.at(share) == pytest.approx(values[round(share * 20_000) - 1], rel=0.02)
    assert len(quantiles._bins) < 2000
    assert Quantiles().at(0.5) == 0


def test_a_size_is_worth_it_while_another_gib_saves_enough() -> None:
    offers = [Offer(1, 100), Offer(2, 180), Offer(4, 220), Offer(8, 230)]  # seconds in two hours
    assert worthwhile(offers, 45, 2) == offers[0]  # the second GiB saves 40 an hour
    assert worthwhile(offers, 39, 2) == offers[1]
    assert worthwhile(offers, 11, 2) == offers[1]
    assert worthwhile(offers, 9, 2) == offers[2]
    assert worthwhile(offers, 1, 2) == offers[3]
    assert worthwhile(offers, 51, 2) is None


def test_where_little_comes_before_much_all_of_it_counts() -> None:
    assert worthwhile([Offer(1, 1), Offer(2, 2), Offer(4, 100)], 10, 1) == Offer(4, 100)
