"""Engines by their own words, and what their counters mean."""

from __future__ import annotations

import asyncio
import json

import pytest

from anaphora.probes.client import ProbeClient
from anaphora.probes.counters import Counters, read_counters
from anaphora.probes.endpoint import Endpoint
from anaphora.probes.engines import Answers, Engine, detect, judge
from anaphora.probes.prometheus import largest, parse_metrics, total
from support.fake_server import Fake, serving


def models(owner: str) -> str:
    return json.dumps({"data": [{"id": "m", "owned_by": owner}, "odd"]})


@pytest.mark.parametrize(
    ("bodies", "headers", "name", "version", "sure", "gateway"),
    [
        ({"/metrics": "anaphora_evictions_total 1\n", "/version": '{"version": "0.1"}'}, {}, "anaphora", "0.1",
         "certain", None),
        ({"/metrics": "#\nvllm:num_requests_running 1\n", "/version": '{"version": "0.33.0"}'}, {}, "vllm", "0.33.0",
         "certain", None),
        ({"/v1/models": models("vllm")}, {}, "vllm", None, "likely", None),
        ({"/version": '{"version": "0.9"}'}, {}, "vllm", "0.9", "guess", None),
        ({"/metrics": "sglang:token_usage 0\n"}, {}, "sglang", None, "certain", None),
        ({"/get_server_info": '{"disable_radix_cache": false}'}, {}, "sglang", None, "certain", None),
        ({"/props": '{"total_slots": 4, "build_info": "b99"}'}, {"server": "llama.cpp"}, "llama.cpp", "b99",
         "certain", None),
        ({"/api/version": '{"version": "0.20.1"}', "/v1/models": models("library")}, {}, "ollama", "0.20.1",
         "certain", None),
        ({"/v1/models": models("transformers")}, {}, "transformers", None, "likely", None),
        ({"/v1/models": models("x")}, {"openai-organization": "o"}, "hosted", None, "likely", None),
        ({"/v1/models": models("vllm")}, {"x-litellm-version": "1.9"}, "vllm", None, "likely", "LiteLLM"),
        ({"/metrics": "<html>", "/props": "[1]", "/version": "oops"}, {}, "unknown", None, "unknown", None),
        ({}, {}, "unknown", None, "unknown", None),
    ],
)  # fmt: skip
def test_engines_are_told_apart(
    bodies: dict[str, str], headers: dict[str, str], name: str, version: str | None, sure: str, gateway: str | None
) -> None:
    engine = judge(Answers(bodies, headers))
    assert (engine.name, engine.version, engine.sure, engine.gateway) == (name, version, sure, gateway)
    assert bool(engine.evidence) == (name != "unknown")
    assert engine.as_dict()["title"] == engine.title


def test_detection_over_the_wire_and_of_nothing() -> None:
    async def main(url: str) -> Engine:
        async with ProbeClient(Endpoint.parse(url, environ={})) as client:
            return await detect(client)

    with serving(Fake()) as url:
        assert asyncio.run(main(url)).title == "vLLM 0.33.0"
    assert asyncio.run(main("http://127.0.0.1:9")) == Engine()


METRICS = r"""
# HELP vllm:prefix_cache_hits hits
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model="a\"b\\c"} 30.0
vllm:prefix_cache_hits_total{engine="1"} 12 1764412345
vllm:prefix_cache_queries_total{engine="0"} 1e2
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:e2e_bucket{le="+Inf"} 7 # {trace="x"} 0.5
vllm:nan NaN
this is no sample at all, really
{} 3
"""


def test_prometheus_text() -> None:
    samples = parse_metrics(METRICS)
    assert total(samples, "vllm:prefix_cache_hits") == 42
    assert largest(samples, "vllm:kv_cache_usage_perc") == 0.5
    assert total(samples, "vllm:absent") is None
    assert samples[0].labels == {"engine": "0", "model": 'a"b\\c'}
    assert [s.value for s in samples if s.name == "vllm:e2e_bucket"] == [7]


def test_counters_of_each_engine() -> None:
    vllm = read_counters(parse_metrics(METRICS))
    assert vllm is not None
    assert (vllm.hit_tokens, vllm.query_tokens, vllm.kv_usage) == (42, 100, 0.5)
    old = read_counters(parse_metrics("vllm:gpu_prefix_cache_hits_total 5\nvllm:gpu_cache_usage_perc 0.1\n"))
    assert old is not None
    assert (old.hit_name, old.hit_tokens, old.kv_usage) == ("vllm:gpu_prefix_cache_hits", 5, 0.1)
    sglang = read_counters(
        parse_metrics(
            'sglang:cached_tokens_total{cache_source="device"} 5\nsglang:cached_tokens_total{cache_source="host"} 2\n'
            "sglang:prompt_tokens_total 9\nsglang:num_queue_reqs 3\n"
        )
    )
    assert sglang is not None
    assert (sglang.hit_tokens, sglang.query_tokens, sglang.waiting) == (7, 9, 3)
    llama = read_counters(parse_metrics("llamacpp:prompt_tokens_total 10\nllamacpp:prompt_tokens_cached_total 30\n"))
    assert llama is not None
    assert (llama.hit_tokens, llama.query_tokens) == (30, 40)  # llama.cpp counts only what it computed
    assert read_counters(parse_metrics("python_info 1\n")) is None


def test_differences_of_counters() -> None:
    before = Counters("vllm", "h", query_tokens=10, hit_tokens=5, kv_usage=0.1)
    after = Counters("vllm", "h", query_tokens=30, hit_tokens=4, kv_usage=0.2)
    change = after.since(before)
    assert (change.query_tokens, change.hit_tokens, change.kv_usage) == (20, None, 0.2)
