"""The verdict on simulated times: hundreds of seeded experiments, no clock and no socket."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from anaphora.probes.verify.verdict import CHECK_AFTER, Round, Verdict, judge, rounds_needed


@dataclass(frozen=True)
class World:
    """A cold request takes 1; a warm one 1 / gain, if it hits."""

    gain: float = 1.0
    hit: float = 1.0
    noise: float = 0.05
    hiccups: float = 0.0
    """Share of requests that take 1.5 to 4 times as long."""
    drift: float = 0.0
    """By how much everything is slower at the end."""
    control_gain: float = 1.0


def experiment(world: World, seed: int, most: int = 24) -> Verdict:
    """As `verify` does it: rounds until a look finds an answer."""
    rng = random.Random(seed)
    rounds: list[Round] = []

    def seconds(factor: float) -> float:
        delay = rng.uniform(1.5, 4) if rng.random() < world.hiccups else 1.0
        return factor * max(0.2, rng.gauss(1, world.noise)) * delay * (1 + world.drift * len(rounds) / most)

    verdict = judge(rounds)
    while len(rounds) < most:
        warm = 1 / world.gain if rng.random() < world.hit else 1.0
        rounds.append(Round(seconds(1.0), seconds(warm), seconds(1 / world.control_gain)))
        if len(rounds) in CHECK_AFTER:
            verdict = judge(rounds, seed=seed)
            if verdict.answer in ("works", "does not") or (verdict.answer == "partly" and len(rounds) >= 10):
                break
    return verdict


def answers(world: World, runs: int) -> Counter[str]:
    return Counter(experiment(world, seed).answer for seed in range(runs))


def test_no_cache_and_five_percent_noise_200_runs_without_a_false_verdict() -> None:
    found = answers(World(), 200)
    assert found["does not"] + found["cannot tell"] == 200
    assert found["cannot tell"] <= 4


def test_a_cache_and_five_percent_noise_200_runs_without_a_false_verdict() -> None:
    found = sum((answers(World(gain=gain), 50) for gain in (12.0, 3.0, 1.6, 1.35)), Counter[str]())
    assert found == {"works": 200}


@pytest.mark.parametrize(
    "world",
    [
        World(noise=0.15, hiccups=0.1),
        World(hiccups=0.2),
        World(drift=1.0),
        World(drift=-0.5),
    ],
    ids=["noisy", "hiccups", "slower", "faster"],
)
def test_no_cache_is_never_taken_for_one(world: World) -> None:
    assert not {"works", "partly"} & set(answers(world, 30))


@pytest.mark.parametrize("world", [World(gain=10, hiccups=0.1), World(gain=5, drift=1.0), World(gain=2, noise=0.15)])
def test_a_cache_is_never_taken_for_none(world: World) -> None:
    found = answers(world, 30)
    assert "does not" not in found
    assert found["works"] >= 28


def test_replicas_are_seen() -> None:
    assert answers(World(gain=8, hit=0.5), 30)["partly"] >= 27


def test_a_fast_control_is_no_prefix_cache() -> None:
    verdict = experiment(World(gain=5, control_gain=5), 1)
    assert verdict.answer == "cannot tell"
    assert "control" in verdict.reason
    assert verdict.more_rounds is None


def test_too_few_rounds_say_how_many_would_do() -> None:
    verdict = judge([Round(1, 0.1, 1)] * 3)
    assert (verdict.answer, verdict.more_rounds, verdict.ratio) == ("cannot tell", CHECK_AFTER[0], None)


def test_an_open_case_says_how_many_rounds_would_tell() -> None:
    rng = random.Random(5)
    noisy = [Round(rng.gauss(1, 0.3), rng.gauss(0.8, 0.2), rng.gauss(1, 0.3)) for _ in range(10)]
    verdict = judge(noisy)
    assert verdict.answer == "cannot tell"
    assert verdict.ratio is not None
    assert verdict.more_rounds == rounds_needed(verdict.ratio, 10)
    assert (verdict.more_rounds or 0) > 10


def test_the_verdict_is_the_same_for_the_same_numbers() -> None:
    assert experiment(World(gain=3), 4) == experiment(World(gain=3), 4)
