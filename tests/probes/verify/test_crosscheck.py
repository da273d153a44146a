"""Who lies, when clock, cached_tokens and counters disagree."""

from __future__ import annotations

import pytest

from anaphora.probes.counters import Counters
from anaphora.probes.engines import Engine
from anaphora.probes.statistics import Interval
from anaphora.probes.verify.crosscheck import cross_check, settle
from anaphora.probes.verify.trials import Kind, Trial
from anaphora.probes.verify.verdict import Answer, Verdict

PREFIX = 2000.0
COUNTERS = Counters("vllm", "vllm:prefix_cache_hits", 0, 0)
HIT, MISS = 0.1, 1.0
Told = tuple[int | None, int | None, int | None]
NOTHING: Told = (None, None, None)
HONEST: Told = (0, 1920, 0)
ZERO: Told = (0, 0, 0)
ALL: Told = (2010, 2010, 2010)


def trials(told: Told, counted: Told, warm: float = HIT, queries: float = 2010) -> list[Trial]:
    kinds: tuple[Kind, ...] = ("cold", "warm", "control")
    return [
        Trial(kind, n, 0, warm if kind == "warm" else MISS, 2010, told[i], counted[i], queries)
        for n in range(6)
        for i, kind in enumerate(kinds)
    ]


def verdict(answer: Answer, threshold: float | None = None) -> Verdict:
    return Verdict(answer, "", 6, threshold=threshold)


@pytest.mark.parametrize(
    ("answer", "told", "counted", "codes", "trusted"),
    [
        ("works", HONEST, HONEST, [], "cached_tokens"),
        ("works", NOTHING, HONEST, ["cached_tokens.missing"], "counters"),
        ("works", ZERO, HONEST, ["cached_tokens.low"], "counters"),
        ("works", HONEST, ZERO, ["counters.low"], "cached_tokens"),
        ("works", ZERO, ZERO, ["cached_tokens.low", "counters.low"], "clock"),
        ("works", ALL, ALL, ["cached_tokens.random", "counters.random"], "clock"),
        ("does not", ZERO, ZERO, [], "clock"),
        ("does not", HONEST, ZERO, ["cached_tokens.high"], "clock"),
        ("does not", ZERO, HONEST, ["counters.high"], "clock"),
        ("does not", ALL, ZERO, ["cached_tokens.random"], "clock"),
        ("works", (0, 1920, 1800), HONEST, ["reuse.shifted"], "cached_tokens"),
        ("cannot tell", HONEST, HONEST, [], "cached_tokens"),
        ("cannot tell", ZERO, ZERO, [], "clock"),
    ],
)
def test_the_liar_is_named(answer: Answer, told: Told, counted: Told, codes: list[str], trusted: str) -> None:
    warm = MISS if answer == "does not" else HIT
    check = cross_check(trials(told, counted, warm), verdict(answer), COUNTERS, Engine("vllm"), PREFIX)
    assert [finding.code for finding in check.findings] == codes
    assert check.trusted == trusted
    assert all(finding.what and finding.fix for finding in check.findings)


OPEN = Interval(1.05, 0.9, 1.3, 0.99)


@pytest.mark.parametrize(
    ("told", "counted", "answer"),
    [
        (ZERO, ZERO, "does not"),
        (HONEST, HONEST, "works"),
        (HONEST, ZERO, "cannot tell"),
        (HONEST, NOTHING, "cannot tell"),
        (ALL, ALL, "cannot tell"),
    ],
)
def test_the_servers_word_settles_what_the_clock_leaves_open(told: Told, counted: Told, answer: str) -> None:
    unsure = Verdict("cannot tell", "", 16, ratio=OPEN)
    settled = settle(unsure, trials(told, counted), PREFIX)
    assert settled.answer == answer
    assert settled.basis == ("clock" if answer == "cannot tell" else "server")
    sure = Verdict("works", "", 16, ratio=OPEN)
    assert settle(sure, trials(ZERO, ZERO), PREFIX) is sure


def test_causes_fit_the_engine_and_the_gateway() -> None:
    def fixes(engine: Engine, told: Told = NOTHING) -> str:
        check = cross_check(trials(told, NOTHING), verdict("works"), None, engine, PREFIX)
        return " ".join(finding.fix for finding in check.findings)

    assert "--enable-prompt-tokens-details" in fixes(Engine("vllm"))
    assert "--enable-cache-report" in fixes(Engine("sglang"))
    assert "--enable-metrics" in fixes(Engine("sglang"))
    assert "--metrics" in fixes(Engine("llama.cpp"))
    assert "LiteLLM" in fixes(Engine("vllm", gateway="LiteLLM"), ZERO)


def test_counters_that_grow_by_the_traffic_of_others_are_no_evidence() -> None:
    check = cross_check(trials(HONEST, ALL, queries=9000), verdict("works"), COUNTERS, Engine("vllm"), PREFIX)
    assert [finding.code for finding in check.findings] == ["counters.others"]


def test_a_cut_prompt_is_seen() -> None:
    check = cross_check(trials(HONEST, HONEST), verdict("works"), COUNTERS, Engine("ollama"), 4096)
    assert "prompt.cut" in [finding.code for finding in check.findings]


def mixed(hits: dict[int, bool], gaps: dict[int, int]) -> list[Trial]:
    found = []
    for n, hit in hits.items():
        found += [Trial("cold", n, 0, MISS, 2010, 0), Trial("control", n, 0, MISS, 2010, 0)]
        found.append(Trial("warm", n, gaps[n], HIT if hit else MISS, 2010, 1920 if hit else 0))
    return found


def test_replicas_and_forgetting_are_told_apart() -> None:
    gaps = {n: 0 if n % 2 else 3 for n in range(10)}
    forgets = mixed({n: gaps[n] == 0 for n in gaps}, gaps)
    replicas = mixed({n: n % 3 == 0 for n in gaps}, gaps)
    for measured, slow, code in ((forgets, 1, "cache.forgets"), (replicas, 3, "replicas.no_affinity")):
        check = cross_check(measured, verdict("partly", 0.3), COUNTERS, Engine("vllm"), PREFIX, slow)
        problems = [finding for finding in check.findings if finding.severity == "problem"]
        assert [finding.code for finding in problems] == [code]
    assert "about 3 replicas" in problems[0].what
