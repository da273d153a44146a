"""The reason at the knee, from figures as sweeps have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from anaphora.cli.main import cli
from anaphora.errors import ConfigError
from anaphora.probes.figures import Quantiles, StepResult
from anaphora.probes.knee import Knee
from anaphora.probes.limits import Limit, find_limit, past_the_knee
from anaphora.probes.predicted import PlanFile, compare, read_plan
from anaphora.probes.step import Engine

LOADS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
KNEE = Knee(8.0, 7.0, 9.0, 8.0, {8.0: 1.0}, 0.0, 10.0, "certain")


def flat(value: float) -> Quantiles:
    return Quantiles(value, value, value, value, 50)


def step(
    load: float, tokens: float, *, ttft: float = 0.05, itl: float = 0.01, engine: Engine | None = None
) -> StepResult:
    return StepResult(
        kind="concurrency",
        level=load,
        ended="precise",
        seconds=10.0,
        requests=50,
        errors={},
        error_example=None,
        unfinished=0,
        precision=0.03,
        ttft=flat(ttft),
        itl=flat(itl),
        tpot=flat(itl),
        e2e=flat(ttft + 100 * itl),
        requests_per_second=tokens / 100,
        output_tokens_per_second=tokens,
        total_tokens_per_second=6 * tokens,
        in_flight=load,
        prompt_tokens=500.0,
        output_tokens=100.0,
        cached_share=0.0,
        engine=engine or Engine(),
    )


def engine(load: float, places: float, usage: float | None, preemptions: float = 0) -> Engine:
    return Engine(usage, min(load, places), max(0.0, load - places), preemptions)


def served(places: float, *, usage: float | None = 0.3, told: bool = True) -> list[StepResult]:
    """So many places; beyond them requests wait and tokens come as fast as before."""
    return [
        step(
            load,
            100 * min(load, places),
            ttft=0.05 + max(0.0, load - places) / places,
            engine=engine(load, places, usage) if told else None,
        )
        for load in LOADS
    ]


def shared(told: bool = True) -> list[StepResult]:
    """A processor that everyone shares from 8 on: all run, each slower."""
    return [
        step(load, 100 * min(load, 8), ttft=0.05 * max(1, load / 8), itl=0.01 * max(1, load / 8),
             engine=engine(load, 1000, 0.4) if told else None)
        for load in LOADS
    ]  # fmt: skip


def crowded(preemptions: float) -> list[StepResult]:
    return [replace(s, engine=engine(s.level, 8, 0.99 if s.level >= 8 else 0.5, preemptions)) for s in served(8)]


CASES: dict[str, tuple[Sequence[StepResult], str, str]] = {
    "batch limit": (served(8), "batch limit", "certain"),
    "batch limit, KV unknown": (served(8, usage=None), "batch limit", "likely"),
    "KV full": (crowded(0), "KV full", "likely"),
    "KV full, preempted": (crowded(3), "KV full", "certain"),
    "compute": (shared(), "compute bound", "certain"),
    "compute, silent": (shared(told=False), "compute bound", "likely"),
    "queue, silent": (served(8, told=False), "queue", "guess"),
    "client": ([*served(8)[:-1], replace(served(8)[-1], core_share=0.98)], "client", "certain"),
    "rate limit": ([*served(64), replace(step(64, 10), errors={"http_429": 30})], "rate limit", "certain"),
    "errors": ([*served(64), replace(step(64, 10), errors={"http_500": 30})], "errors", "certain"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_reason_is_found(name: str) -> None:
    steps, kind, sure = CASES[name]
    limit = find_limit(steps, KNEE, engine="vllm")
    assert (limit.kind, limit.sure) == (kind, sure), limit
    assert limit.evidence
    assert limit.advice


def test_a_healthy_server_below_its_knee_has_no_limit() -> None:
    assert find_limit(served(1000), None).kind == "not reached"
    assert find_limit([step(1, 100)], None).kind == "not reached"


def test_the_advice_is_in_the_engines_own_words() -> None:
    assert "--max-num-seqs" in find_limit(served(8), KNEE, engine="vllm").advice
    assert "--max-running-requests" in find_limit(served(8), KNEE, engine="sglang").advice
    assert "OLLAMA_NUM_PARALLEL" in find_limit(served(8), KNEE, engine="ollama").advice
    assert "limit of running requests" in find_limit(served(8), KNEE).advice


def test_the_numbers_are_named() -> None:
    limit = find_limit(served(8), KNEE)
    assert "8" in limit.text
    assert any("24 waited" in text for text in limit.evidence)


def test_past_the_knee_needs_two_steps_without_gain_and_with_longer_waits() -> None:
    steps = served(8)
    assert not past_the_knee(steps[:5])
    assert past_the_knee(steps)
    assert not past_the_knee(served(1000))
    assert not past_the_knee([step(1, 100), step(2, 100), step(4, 100)])  # no gain, but no waiting either


PLAN = PlanFile("m", "vllm", 8192, 6400, 16, 8, 7, 9, None)


def limited(kind: str = "KV full") -> Limit:
    return replace(find_limit(crowded(3), KNEE), kind=kind)  # type: ignore[arg-type]


def test_a_plan_that_was_right() -> None:
    found = compare(PLAN, crowded(3), KNEE, limited())
    assert found is not None
    assert found.predicted == pytest.approx(6400 / 608)  # 600 tokens take 38 blocks of 16
    assert (found.found, found.by) == (8, "KV memory")
    assert found.low < found.predicted < found.high


def test_a_plan_with_a_batch_limit() -> None:
    plan = replace(PLAN, kv_tokens=1_000_000, fit=100, fit_low=90, fit_high=110, max_num_seqs=8)
    found = compare(plan, served(8), KNEE, find_limit(served(8), KNEE))
    assert found is not None
    assert (found.predicted, found.found, found.by) == (8, 8, "max_num_seqs")
    assert "agree" in found.text


def test_a_plan_that_was_wrong_and_one_that_was_not_tried() -> None:
    plan = replace(PLAN, kv_tokens=64_000, fit=100, fit_low=95, fit_high=105)
    found = compare(plan, crowded(3), KNEE, limited())
    assert found is not None
    assert "Something else limits" in found.text
    below = compare(PLAN, served(1000), None, find_limit(served(1000), None))
    assert below is not None
    assert below.found is None
    assert "did not get there" in below.text


def test_read_plan_takes_what_plan_writes(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = ["--hardware", "rtx-4090", "--context", "8192", "--concurrency", "16", "--engine", "vllm", "--json"]
    written = CliRunner().invoke(cli, ["plan", "Qwen/Qwen2.5-7B-Instruct", *options])
    path.write_text(written.stdout)
    plan = read_plan(path)
    assert (plan.model, plan.engine, plan.context, plan.block_size) == ("Qwen/Qwen2.5-7B-Instruct", "vllm", 8192, 16)
    assert plan.fit_low <= plan.fit <= plan.fit_high
    assert plan.kv_tokens >= plan.fit * plan.context


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"schema_version": 2, "command": "plan"}', '{"schema_version": 1, "command": "plan"}']
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="anaphora plan"):
        read_plan(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(tmp_path / "missing.json")
