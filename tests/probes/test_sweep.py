"""The whole sweep against servers with real sockets whose limit is known."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from anaphora.cli.main import cli
from anaphora.errors import ConfigError
from anaphora.probes.client import ProbeClient
from anaphora.probes.endpoint import Endpoint
from anaphora.probes.figures import Quantiles, ServiceLevel
from anaphora.probes.load import Outcome
from anaphora.probes.step import StepBounds, StepRecorder, median_precision
from anaphora.probes.stream import StreamResult
from anaphora.probes.sweep import Loads, Sweep, measure
from anaphora.probes.sweep_report import as_dict, html_page
from anaphora.probes.workload import Job, Lengths, SyntheticWorkload
from support.fake_server import Fake, serving

QUICK = ["--prompt-tokens", "60", "--output-tokens", "5", "--step-seconds", "2", "--precision", "0.15", "--seed", "1"]


def fake(**knobs: Any) -> Fake:
    """Latencies that a busy machine does not drown: 40 ms to the first token, 8 ms for each."""
    return Fake(**{"granularity": None, "overhead": 0.04, "decode_seconds": 0.008, "max_num_seqs": 3, **knobs})


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["sweep", *arguments])


def report(url: str, *arguments: str) -> dict[str, Any]:
    result = run(url, *QUICK, "--json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_batch_limit_is_found_with_its_knee_and_its_reason(tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    server = fake(kv_tokens=10_000, api_key="sk-very-secret-key")
    with serving(server) as url:
        found = report(url, "--api-key", "sk-very-secret-key", "--html", str(html), "--slo", "ttft=5s,itl=500ms")
    assert found["knee"]["step"] in (2, 3, 4)
    assert found["knee"]["low"] <= found["knee"]["load"] <= found["knee"]["high"]
    assert (found["limit"]["kind"], found["limit"]["sure"]) == ("batch limit", "certain")
    loads = [step["load"] for step in found["steps"]]
    assert loads == sorted(loads)
    assert loads[-1] < 64  # stopped early
    assert "clearly past the knee" in found["stopped"]
    first = found["steps"][0]
    assert first["ttft_ms"]["p50"] > 40
    assert 7 < first["itl_ms"]["p50"] < 80
    assert first["output_tokens"] == 5
    assert first["prompt_tokens"] == pytest.approx(60, abs=3)
    assert first["goodput"] == pytest.approx(first["requests_per_second"])
    assert max(step["engine"]["running"] for step in found["steps"]) == 3
    page = html.read_text()
    assert page.count("<svg") >= 4
    assert "knee:" in page
    assert "sk-very" not in page
    assert "sk-very" not in json.dumps(found)
    assert all("ignore_eos" in body for body in server.requests[-5:])


def test_full_kv_memory_is_found() -> None:
    with serving(fake(max_num_seqs=None, kv_tokens=66 * 3)) as url:
        found = report(url)
    assert found["limit"]["kind"] == "KV full"
    assert found["knee"]["step"] in (2, 3, 4)


def test_an_open_loop_ends_when_the_server_falls_behind() -> None:
    """Three places of 80 ms each: about 37 requests/s."""
    with serving(fake(counters="missing")) as url:
        found = report(url, "--rate", "5,10,20,30,60,90,120", "--precision", "0.3")
    assert found["loop"] == "open"
    assert "falls behind" in found["stopped"]
    assert 10 <= found["knee"]["step"] <= 80
    served = max(step["requests_per_second"] for step in found["steps"])
    assert served < 50


def test_a_rate_limit_is_named_and_the_errors_are_counted() -> None:
    with serving(fake(refuse_above=3, max_num_seqs=None)) as url:
        found = report(url, "--concurrency", "1:16")
    assert found["limit"]["kind"] == "rate limit"
    assert found["steps"][-1]["errors"]["http_429"] >= 2
    assert "5% of the requests failed" in found["stopped"]


def test_shared_prefixes_show_up_as_cached_tokens() -> None:
    with serving(fake(granularity=1, max_num_seqs=None)) as url:
        found = report(url, "--concurrency", "2", "--shared-prefix", "40")
    assert found["steps"][0]["cached_share"] == pytest.approx(40 / 60, abs=0.15)
    assert found["steps"][0]["engine"]["hit_share"] == pytest.approx(40 / 60, abs=0.2)
    assert found["knee"] is None


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": n, "input_length": 1025 + 10 * n, "output_length": 40, "hash_ids": [0, 1, 2 + n]}
        for n in range(30)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    with serving(fake(granularity=1, max_num_seqs=None)) as url:
        found = report(url, "--concurrency", "2", "--trace", str(trace), "--trace-scale", "0.1")
    step = found["steps"][0]
    assert 100 <= step["prompt_tokens"] <= 250
    assert step["output_tokens"] == 4
    assert step["cached_share"] > 0.3


def test_an_unmet_service_level_is_exit_code_1_and_the_text_has_the_definitions() -> None:
    with serving(fake()) as url:
        result = run(url, *QUICK, "--concurrency", "1,2", "--slo", "ttft=1ms")
    assert result.exit_code == 1
    assert "Not even the lightest load" in result.stdout
    assert "first content chunk - request sent" in " ".join(result.stdout.split())
    assert "concurrency 1: TTFT p50" in result.stderr


def test_bounds_in_requests_and_time_are_kept() -> None:
    server = fake()
    with serving(server) as url:
        found = report(url, "--max-requests", "60")
        assert found["requests_sent"] == 60
        assert len(server.requests) <= 60 + 2  # two that measure the scale
        assert "--max-requests" in found["stopped"]
        began = time.monotonic()
        found = report(url, "--max-seconds", "3", "--precision", "0.001", "--concurrency", "1,2,3,4")
        assert time.monotonic() - began < 12
    assert "--max-seconds" in found["stopped"]
    assert found["steps"]


def test_a_step_with_few_answers_ends_the_sweep_and_keeps_the_earlier_ones() -> None:
    """One place of 0.5 s: alone a request is answered in time, of forty the last would wait for twenty seconds."""
    with serving(fake(max_num_seqs=1, overhead=0.5)) as url:
        found = report(url, "--concurrency", "1,40", "--step-seconds", "1.5")
    assert found["steps"][0]["load"] == 1
    assert found["steps"][0]["ttft_ms"]["p50"] > 500
    assert found["steps"][-1]["unfinished"] > 30
    assert "concurrency 40" in found["stopped"]


def test_a_dead_server_is_exit_code_3() -> None:
    result = run("http://127.0.0.1:9", *QUICK)
    assert result.exit_code == 3 or "Nothing listens" in str(result.exception)


def test_what_was_measured_is_kept_when_it_is_interrupted() -> None:
    endpoint: Endpoint

    async def interrupted(state: Sweep) -> None:
        async with ProbeClient(endpoint) as client:
            task = asyncio.create_task(measure(state, client, lambda *_: None))
            for _ in range(400):
                await asyncio.sleep(0.05)
                if len(state.steps) >= 2:
                    break
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    state = Sweep(
        Loads.parse("1,2,3", "concurrency"),
        lambda scale: SyntheticWorkload(Lengths.parse("40", ""), Lengths.parse("4", ""), scale),
        bounds=StepBounds(0.3, 2.0),
    )
    with serving(fake()) as url:
        endpoint = Endpoint.parse(url, environ={})
        asyncio.run(interrupted(state))
    assert [step.level for step in state.steps] == [1, 2, 3]
    assert state.steps[-1].ended == "interrupted"
    found = as_dict(state, endpoint, interrupted=True)
    assert found["interrupted"] is True
    assert len(found["steps"]) == 3
    assert "<svg" in html_page(state, endpoint)


@pytest.mark.parametrize(
    ("text", "kind", "levels"),
    [
        ("1:64", "concurrency", (1, 2, 4, 8, 16, 32, 64)),
        ("3:20", "concurrency", (3, 6, 12, 20)),
        ("10:30:10", "concurrency", (10, 20, 30)),
        ("8,1,2,2", "concurrency", (1, 2, 8)),
        ("7", "concurrency", (7,)),
        ("0.5:3", "rate", (0.5, 1, 2, 3)),
    ],
)
def test_loads(text: str, kind: Any, levels: tuple[float, ...]) -> None:
    assert Loads.parse(text, kind).levels == levels


@pytest.mark.parametrize("text", ["", "0", "0:4", "8:2", "1:8:0", "1.5", "a", "1:2:3:4", "-1"])
def test_impossible_loads_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--concurrency.*1:64"):
        Loads.parse(text, "concurrency")


def test_the_number_of_steps_is_bounded() -> None:
    assert len(Loads.parse("1:100000:1", "concurrency").levels) == 100


def test_service_levels() -> None:
    slo = ServiceLevel.parse("ttft=500ms, itl=0.05s")
    assert slo.limits == {"ttft": 0.5, "itl": 0.05}
    result = StreamResult(0.0, chunk_times=[0.4, 0.44, 0.48, 0.52])
    assert slo.met(result)
    assert not slo.met(StreamResult(0.0, chunk_times=[0.6, 0.64]))
    assert not slo.met(StreamResult(0.0, chunk_times=[0.4, 0.5, 0.6]))
    assert ServiceLevel.parse("e2e=1s,tpot=40ms").met(result)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=500", "speed=1s", "ttft=1s,ttft=2s", "ttft=0ms"])
def test_unreadable_service_levels_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="ttft=500ms,itl=50ms"):
        ServiceLevel.parse(text)


def test_closed_and_open_exclude_each_other() -> None:
    result = run("http://127.0.0.1:9", "--concurrency", "1", "--rate", "1")
    assert isinstance(result.exception, ConfigError)


def test_the_precision_of_a_median_counts_neighbours_that_go_together() -> None:
    rng = random.Random(0)
    alone = [rng.lognormvariate(0, 0.5) for _ in range(400)]
    together = [value for value in alone[:100] for _ in range(4)]
    assert median_precision(alone) == pytest.approx(1.96 * 0.5 * 1.2533 / math.sqrt(400), rel=0.4)
    assert median_precision(together) > 2 * median_precision(alone)
    assert median_precision([0.1] * 10) == 0


def test_the_interval_of_the_median_holds_in_nineteen_of_twenty() -> None:
    held = 0
    for seed in range(200):
        rng = random.Random(seed)
        values = sorted(rng.lognormvariate(0, 0.5) for _ in range(60))
        rng.shuffle(values)
        half = median_precision(values)
        middle = sorted(values)[30]
        held += middle * (1 - 1.1 * half) <= 1 <= middle * (1 + 1.1 * half)
    assert held >= 180


def outcome(number: int, started: float, *, first: bool) -> Outcome:
    job = Job([], 10, 2)
    return Outcome(
        job, started, first, 0.0, started + 0.01, StreamResult(started, chunk_times=[0.01 + number * 1e-5, 0.02])
    )


def test_a_step_drops_the_warm_up_and_waits_for_its_last_requests() -> None:
    """Driven by hand: the first answers of both clients are warm-up, requests after the close do not count."""

    async def drive() -> None:
        recorder = StepRecorder("concurrency", 2, StepBounds(precision=0.5, seconds=100.0, requests=5))
        now = time.perf_counter()
        firsts = [outcome(n, now, first=True) for n in range(2)]
        for one in firsts:
            recorder.sent(one)
        for one in firsts:
            recorder.done(one)
        window = [outcome(n, time.perf_counter(), first=False) for n in range(5)]
        for one in window:
            recorder.sent(one)
        late = outcome(9, time.perf_counter(), first=False)
        recorder.sent(late)
        recorder.done(late)
        for one in window[:-1]:
            recorder.done(one)
        assert not recorder.stop.is_set()  # the load stays up for the last of them
        recorder.done(window[-1])
        assert recorder.stop.is_set()
        assert recorder.ended == "requests"
        assert recorder.measured == window

    asyncio.run(drive())


def test_quantiles() -> None:
    found = Quantiles.of([0.1 * n for n in range(1, 102)])
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.count) == pytest.approx((5.1, 9.1, 10.0, 101))
    assert Quantiles.of([]) is None
