"""Learning a tier's speed, and choosing between fetching and computing."""

from __future__ import annotations

import random

import pytest

from anaphora.tiers.break_even import LoadSpeed, PrefillSpeed, Run, SpeedEstimate, blocks_to_load

EXPECTED = LoadSpeed(0.001, 1e9)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("true", [LoadSpeed(0.0002, 5e9), LoadSpeed(0.02, 1e8), LoadSpeed(0.0, 3e8)])
def test_the_speed_is_learnt_from_loads_of_mixed_sizes(true: LoadSpeed) -> None:
    clock, dice = Clock(), random.Random(1)
    estimate = SpeedEstimate(EXPECTED, clock)
    for _ in range(200):
        clock.now += 0.05
        nbytes = int(2 ** dice.uniform(18, 27))
        estimate.observe(nbytes, true.seconds(nbytes) * dice.uniform(0.9, 1.1))
    for nbytes in (1 << 20, 1 << 24, 1 << 27):
        assert estimate.speed().seconds(nbytes) == pytest.approx(true.seconds(nbytes), rel=0.25)


def test_one_size_is_enough_to_know_that_size() -> None:
    clock = Clock()
    estimate, nbytes = SpeedEstimate(EXPECTED, clock), 368_640
    for _ in range(100):
        estimate.observe(nbytes, 0.5)
    assert estimate.speed().seconds(nbytes) == pytest.approx(0.5, rel=0.1)
    assert estimate.speed().bandwidth > 0


def test_before_the_first_load_the_expectation_holds_and_it_comes_back() -> None:
    clock = Clock()
    estimate = SpeedEstimate(EXPECTED, clock)
    assert estimate.speed().seconds(1 << 24) == pytest.approx(EXPECTED.seconds(1 << 24))
    for _ in range(50):
        estimate.observe(1 << 24, 10.0)
    assert estimate.speed().seconds(1 << 24) > 5.0
    clock.now = 3600.0
    assert estimate.speed().seconds(1 << 24) == pytest.approx(EXPECTED.seconds(1 << 24), rel=0.01)


def test_a_fast_tier_is_loaded_and_a_slow_one_is_not() -> None:
    runs = [Run(tier=0, blocks=256, tokens=4096, nbytes=256 * 368_640)]
    prefill = PrefillSpeed(per_token=1 / 500)
    count, saved = blocks_to_load(runs, 0, 4100, [LoadSpeed(0.001, 6e8)], prefill)
    assert count == 256
    assert saved == pytest.approx(4096 / 500 - 256 * 368_640 / 6e8 - 0.001)
    assert blocks_to_load(runs, 0, 4100, [LoadSpeed(0.001, 1e7)], prefill) == (0, 0.0)


def test_a_slow_tail_is_left_to_computing() -> None:
    runs = [Run(0, 10, 160, 10 << 20), Run(1, 10, 160, 10 << 20)]
    speeds = [LoadSpeed(0.0, 1e10), LoadSpeed(30.0, 1e10)]
    assert blocks_to_load(runs, 0, 1000, speeds, PrefillSpeed(0.01))[0] == 10


def seconds(runs: list[Run], count: int, start: int, stop: int, speeds: list[LoadSpeed], pre: PrefillSpeed) -> float:
    """By the definition: block by block."""
    by_tier: dict[int, int] = {}
    position, left = start, count
    for run in runs:
        taken = min(left, run.blocks)
        if taken:
            by_tier[run.tier] = by_tier.get(run.tier, 0) + run.nbytes // run.blocks * taken
        position += run.tokens // run.blocks * taken
        left -= taken
    loading = max((speeds[tier].seconds(nbytes) for tier, nbytes in by_tier.items()), default=0.0)
    return loading + pre.seconds(position, stop)


@pytest.mark.parametrize("seed", range(60))
def test_no_other_number_of_blocks_is_better(seed: int) -> None:
    dice = random.Random(seed)
    runs = [Run(dice.randrange(3), n := dice.randint(1, 20), n * 16, n * 100_000) for _ in range(4)]
    speeds = [LoadSpeed(10 ** dice.uniform(-4, 0), 10 ** dice.uniform(6, 9)) for _ in range(3)]
    prefill = PrefillSpeed(10 ** dice.uniform(-4, -2), 10 ** dice.uniform(-8, -5))
    stop = 32 + sum(run.tokens for run in runs) + 5
    count, saved = blocks_to_load(runs, 32, stop, speeds, prefill)
    total = sum(run.blocks for run in runs)
    best = min(seconds(runs, n, 32, stop, speeds, prefill) for n in range(total + 1))
    chosen = seconds(runs, count, 32, stop, speeds, prefill)
    assert chosen == pytest.approx(best)
    assert saved == pytest.approx(seconds(runs, 0, 32, stop, speeds, prefill) - chosen, abs=1e-9)
