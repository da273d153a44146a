"""/metrics as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from anaphora.server.metrics import COUNTERS, GAUGES, HISTOGRAMS
from support.servers import Served


@pytest.fixture
def served(serve_tiny: Callable[..., Served]) -> Served:
    return serve_tiny()


def test_counters_of_one_request_and_of_its_repetition(served: Served) -> None:
    prompt = "some text of forty-eight tokens, one per byte..."
    assert len(prompt) == 48
    for _ in range(2):
        served.openai().completions.create(
            model="tiny", prompt=prompt, max_tokens=5, temperature=0, extra_body={"ignore_eos": True}
        )
    samples = served.wait_for(lambda samples: samples["anaphora_kv_blocks{state=active}"] == 0)
    assert samples["anaphora_prompt_tokens_total"] == 96
    assert samples["anaphora_prefix_cache_queries_total"] == 96
    assert samples["anaphora_prefix_cache_hits_total"] == samples["anaphora_cached_tokens_total"] == 47
    assert samples["anaphora_generated_tokens_total"] == 10
    assert samples["anaphora_computed_tokens_total"] == (48 + 4) + (1 + 4)
    assert samples["anaphora_requests_finished_total{reason=length}"] == 2
    assert samples["anaphora_kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert samples["anaphora_kv_block_size_tokens"] == 16
    assert samples["anaphora_kv_blocks{state=cached}"] > 0
    assert sum(samples[f"anaphora_kv_blocks{{state={state}}}"] for state in ("free", "active", "cached")) == 128
    assert samples["anaphora_kv_usage_ratio"] == 0
    assert samples["anaphora_time_to_first_token_seconds_count"] == 2
    assert samples["anaphora_inter_token_latency_seconds_count"] == 8
    assert samples["anaphora_e2e_request_latency_seconds_count"] == 2
    assert samples["anaphora_request_queue_time_seconds_count"] == 2
    assert samples["anaphora_step_seconds_count"] == 10
    assert samples["anaphora_http_requests_total{method=POST,route=/v1/completions,status=200}"] == 2


def test_families_are_as_prometheus_wants_them(served: Served) -> None:
    with served.client() as client:
        client.request("BREW", "/v1/completions")
        client.get("/made/up/path")
        client.get("/v1/models/some/model")
        reply = client.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=")
        families = {family.name: family for family in text_string_to_metric_families(reply.text)}
        as_openmetrics = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        again = parse_openmetrics(as_openmetrics.text)  # type: ignore[no-untyped-call]
        assert {family.name for family in again} == set(families)
    assert set(families) >= {*GAUGES, *COUNTERS, *HISTOGRAMS}
    for name, family in families.items():
        assert name.startswith("anaphora_")
        assert family.documentation.endswith(".")
        names = {sample.name for sample in family.samples}
        if family.type == "counter":
            assert names <= {f"{name}_total"}
        elif family.type == "histogram":
            assert name.endswith("_seconds")
            buckets = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
            assert buckets == sorted(buckets)
            assert family.samples[len(buckets) - 1].labels == {"le": "+Inf"}
        else:
            assert family.type == "gauge"
            assert not name.endswith("_total")
    labels = {(s.labels["method"], s.labels["route"]) for s in families["anaphora_http_requests"].samples}
    assert labels == {("other", "/v1/completions"), ("GET", "other"), ("GET", "/v1/models/{model_id}")}
