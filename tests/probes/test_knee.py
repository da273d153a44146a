"""The knee finder on queues whose knee is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from anaphora.probes.knee import Knee, StepTimes, find_knee
from support import queues

SEEDS = 50
Queue = Callable[[float, int, random.Random], list[float]]

CLOSED = (1, 2, 4, 8, 16, 32, 64)
BELOW_AND_ABOVE = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2)
QUEUES: dict[str, tuple[Queue, Sequence[int]]] = {
    "closed M/M/c": (lambda x, c, rng: queues.closed_mmc(int(x), c, rng, requests=120), (2, 3, 4, 6, 8, 12, 16, 24)),
    "batch limited": (lambda x, c, rng: queues.batch_limited(int(x), c, rng, requests=80), (2, 3, 4, 6, 8, 12, 16, 24)),
}
"""Name -> TTFTs at a load for a knee, and the knees that are tried."""


def step_of(loads: Sequence[float], value: float) -> int:
    """Index of the highest load that is not above `value`."""
    return max(i for i, load in enumerate(loads) if load <= value * (1 + 1e-9))


def sweep(loads: Sequence[float], ttfts: Callable[[float], list[float]], seed: int) -> Knee | None:
    return find_knee([StepTimes(load, ttfts(load)) for load in loads], seed=seed, resamples=40)


@pytest.mark.parametrize("name", QUEUES)
def test_closed_queues_with_a_known_knee(name: str) -> None:
    queue, knees = QUEUES[name]
    right = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        truth = rng.choice(knees)
        loads = [load for load in CLOSED if load <= 6 * truth]  # a sweep ends when it is clearly past
        if len(loads) < 4:
            loads = list(CLOSED[:4])
        found = sweep(loads, lambda load, truth=truth, rng=rng: queue(load, truth, rng), seed)  # type: ignore[misc]
        right += found is not None and abs(step_of(loads, found.step) - step_of(loads, truth)) <= 1
    assert right >= 0.95 * SEEDS


@pytest.mark.parametrize("servers", [1, 4, 16])
def test_open_mmc_turns_steep_at_its_capacity(servers: int) -> None:
    right = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        shift = 2 ** rng.uniform(-0.5, 0.5)  # the capacity lies anywhere between two steps
        loads = [shift * share for share in BELOW_AND_ABOVE]

        def ttfts(load: float, rng: random.Random = rng) -> list[float]:
            return queues.open_mmc(load, servers, rng, requests=200)

        found = sweep(loads, ttfts, seed)
        right += found is not None and abs(step_of(loads, found.step) - step_of(loads, 1)) <= 1
    assert right >= 0.95 * SEEDS


def test_no_knee_where_none_was_reached() -> None:
    found = []
    for seed in range(20):
        rng = random.Random(seed)
        found.append(sweep(CLOSED[:6], lambda load, rng=rng: queues.closed_mmc(int(load), 64, rng), seed))  # type: ignore[misc]
    assert found.count(None) >= 19


def test_proportional_growth_is_no_knee() -> None:
    rng = random.Random(1)
    assert sweep(CLOSED, lambda load: [0.05 * load * rng.uniform(0.9, 1.1) for _ in range(100)], 1) is None


def test_the_estimate_lies_within_its_interval_and_says_how_sure_it_is() -> None:
    rng = random.Random(5)
    knee = sweep(CLOSED, lambda load: queues.closed_mmc(int(load), 8, rng), 5)
    assert knee is not None
    assert knee.low <= knee.load <= knee.high
    assert (knee.step, knee.sure) == (8, "certain")
    assert 7 <= knee.load <= 9
    assert sum(knee.shares.values()) + knee.missing == pytest.approx(1)
    assert knee.rise > 5


def test_certain_means_right_even_with_few_noisy_requests() -> None:
    """Eight requests a step that scatter by a factor of two."""
    certain = right = 0
    for seed in range(40):
        rng = random.Random(seed)

        def ttfts(load: float, rng: random.Random = rng) -> list[float]:
            return [(0.05 + 0.02 * max(0.0, load - 8)) * rng.lognormvariate(0, 0.7) for _ in range(8)]

        found = sweep(CLOSED, ttfts, seed)
        if found is not None and found.sure == "certain":
            certain += 1
            right += abs(step_of(CLOSED, found.step) - step_of(CLOSED, 8)) <= 1
    assert 0 < certain < 40
    assert right >= 0.9 * certain


def test_too_little_is_no_knee() -> None:
    assert find_knee([]) is None
    assert find_knee([StepTimes(load, [0.1] * 20) for load in (1, 2, 4)]) is None
    assert find_knee([StepTimes(load, [0.1, 0.1]) for load in CLOSED]) is None


def test_the_order_of_the_steps_does_not_matter_and_the_seed_decides() -> None:
    steps = [StepTimes(load, queues.closed_mmc(load, 4, random.Random(load))) for load in CLOSED]
    assert find_knee(steps, seed=3) == find_knee(steps[::-1], seed=3)
