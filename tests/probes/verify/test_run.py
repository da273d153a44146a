"""`verify` against servers that cache in their own ways, or lie about it: real sockets, known truth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anaphora.errors import ConfigError, EndpointRefused
from anaphora.probes.verify import report
from anaphora.probes.verify.run import Verification
from support.fake_server import Fake, serving
from support.verify_runs import replayed, verified


def codes(state: Verification) -> set[str]:
    return {finding.code for finding in state.findings()}


@pytest.mark.parametrize(
    ("fake", "step", "minimum", "found"),
    [
        (Fake(granularity=1, template=0, buffered=True), 1, 1, {"stream.buffered"}),
        (Fake(granularity=16, cached_tokens="zero", noise=0.05), 16, 16, {"cached_tokens.low"}),
        (Fake(granularity=128, min_prefix=1024, counters="zero"), 128, 1024, {"counters.low"}),
        (Fake(granularity=784), 784, 784, set()),
    ],
    ids=["1", "16", "128", "784"],
)
def test_caches_work_and_their_steps_are_found(fake: Fake, step: int, minimum: int, found: set[str]) -> None:
    with serving(fake) as url:
        state = verified(url, 2000)
    verdict, granularity = state.verdict(), state.granularity
    assert verdict.answer == "works", verdict
    assert verdict.ratio is not None
    assert 1.5 < verdict.ratio.low <= verdict.ratio.estimate <= verdict.ratio.high
    assert verdict.hit_share is not None
    assert granularity is not None
    assert (granularity.step, granularity.step_exact) == (step, True)
    assert granularity.minimum == minimum
    assert codes(state) == found
    assert report.exit_code(state) == 0
    if minimum > 1:
        assert f"Prefixes under {minimum:,} tokens are never reused" in granularity.sentence


def test_steps_by_the_clock_alone() -> None:
    fake = Fake(granularity=400, cached_tokens="missing", counters="missing", seconds_per_token=1e-4)
    with serving(fake) as url:
        state = verified(url, 1000)
    assert state.verdict().answer == "works"
    assert codes(state) == {"cached_tokens.missing", "counters.missing"}
    granularity = state.granularity
    assert granularity is not None
    assert granularity.source == "clock"
    assert granularity.minimum is not None
    # the bound holds in any case; where the machine is quiet the edge itself is found
    assert 400 * 0.95 <= granularity.minimum <= 1000
    if granularity.minimum_exact:
        assert granularity.minimum == pytest.approx(400, rel=0.05)


def test_no_cache_and_a_report_that_claims_everything() -> None:
    with serving(Fake(granularity=None, cached_tokens="everything", counters="missing", seconds_per_token=1e-4)) as url:
        state = verified(url, 2000, max_rounds=54)
    assert state.verdict().answer == "does not", state.verdict()
    assert codes(state) == {"cached_tokens.random", "counters.missing"}
    assert state.granularity is None
    assert report.exit_code(state) == 1


def test_replicas_without_affinity() -> None:
    with serving(Fake(replicas=3, seconds_per_token=1e-4)) as url:
        state = verified(url, 1000)
    assert state.verdict().answer == "partly", state.verdict()
    assert "replicas.no_affinity" in codes(state)
    assert report.exit_code(state) == 1


def test_an_engine_with_one_slot() -> None:
    with serving(Fake(granularity=1, capacity=1, seconds_per_token=1e-4)) as url:
        state = verified(url, 1000)
    assert state.verdict().answer == "partly", state.verdict()
    assert "cache.forgets" in codes(state)


def test_a_key_that_is_missing_is_an_error_of_the_first_request() -> None:
    with serving(Fake(api_key="sk-x")) as url, pytest.raises(EndpointRefused, match="--api-key"):
        verified(url, 1000)


LONG = "the rules of the house are many and we say them all again and again " * 12


def test_own_prompts_are_replayed_and_their_misses_explained(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    with path.open("w") as file:
        for tick in (1, 2, 2):
            system = {"role": "system", "content": f"Time: 2026-11-29 10:15:0{tick}. {LONG}"}
            print(json.dumps({"messages": [system, {"role": "user", "content": "What is allowed?"}]}), file=file)
    with serving(Fake(granularity=16)) as url:
        state = replayed(url, path)
    first, second, third = state.results()
    assert first.hit is False
    assert second.hit is False
    assert second.divergence is not None
    assert second.divergence.cause.code == "timestamp"
    assert second.divergence.nearest == 0
    assert third.hit
    assert third.divergence is None
    assert all(result.hit_again for result in state.results())
    assert report.own_exit_code(state) == 1
    assert "1 of 2 prompts" in report.own_headline(state)


def test_plain_text_prompts_and_the_clock_alone(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(f"one {LONG}\n\ntwo {LONG}\n")
    with serving(Fake(granularity=1, usage=False, counters="missing", seconds_per_token=5e-4)) as url:
        state = replayed(url, path)
    assert [result.hit for result in state.results()] == [False, False]
    assert [result.hit_again for result in state.results()] == [True, True]


def test_no_cache_for_own_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(f"one {LONG}\ntwo {LONG}\n")
    with serving(Fake(granularity=None)) as url:
        state = replayed(url, path)
    assert [result.hit_again for result in state.results()] == [False, False]
    assert state.needs_attention()
    assert "no prefix cache" in report.own_headline(state)


@pytest.mark.parametrize("text", ["", "{oops\n", '{"messages": []}\n', '{"a": 1}\n', '{"messages": [1]}\n'])
def test_files_that_hold_no_prompts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"prompts\.jsonl"):
        replayed("http://127.0.0.1:9", path)
