"""What is not KV: physics that can be checked by hand, and predictions against public start-up reports."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from anaphora.errors import UnsupportedModel
from anaphora.geometry.model import ModelGeometry
from anaphora.planning.ask import Wishes, ask
from anaphora.planning.capability import compute_capability
from anaphora.planning.hardware import find_device
from anaphora.planning.overhead import GIB, Budget, Estimate, Part, activation_per_token, weight_estimate
from anaphora.planning.overhead_vllm import default_batched_tokens, default_max_num_seqs, default_utilization
from anaphora.planning.plan import Question
from anaphora.planning.protocol import EngineSettings
from support.reports import FILE, left_out, needs, predict, reports

LLAMA = "meta-llama/Meta-Llama-3.1-8B-Instruct"


def question(name: str, wishes: Wishes) -> Question:
    return ask(name, ModelGeometry.from_catalog(name), wishes)[0]


def test_activation_of_a_token_as_two_logs_measured_it() -> None:
    """2.07 GiB for 20,000 tokens and 2.99 for 29,000 of Llama-3.1-8B."""
    per_token = activation_per_token(ModelGeometry.from_catalog(LLAMA), 1, 2)
    assert per_token == 2 * (3 * 4096 + 3 * 14336) == 110_592
    assert 20_000 * per_token / GIB == pytest.approx(2.07, abs=0.015)
    assert 29_000 * per_token / GIB == pytest.approx(2.99, abs=0.015)


@pytest.mark.parametrize(
    ("name", "measured"),
    [(LLAMA, 4.76), ("Qwen/Qwen3-0.6B", 5.56), ("Qwen/Qwen3-32B", 5.64), ("openai/gpt-oss-20b", 7.38)],
)
def test_the_sampler_is_the_peak_on_large_cards(name: str, measured: float) -> None:
    """vLLM 0.11 on an H100: 1,024 rows of logits sorted whole beside 8,192 hidden states."""
    wishes = Wishes("h100", context=16000, engine="vllm", engine_version="0.11", utilization=0.9, max_num_seqs=1024)
    asked = question(name, wishes)
    estimate = asked.engine.budget(asked.situation).part("activations")
    assert estimate.likely / GIB == pytest.approx(measured, rel=0.006)
    assert estimate.low < measured * GIB < estimate.high


def test_rules_by_version() -> None:
    """0.92 since 0.22; graphs come out of the share since 0.21; no sort since 0.14."""
    assert [default_utilization(v) for v in ((0, 11), (0, 21), (0, 22), None)] == [0.9, 0.9, 0.92, 0.92]
    old, new = (
        question(LLAMA, Wishes("h100", context=8192, engine_version=v, max_num_seqs=256)) for v in ("0.11", "0.33")
    )
    before, after = (asked.engine.budget(asked.situation) for asked in (old, new))
    graphs = {part.inside for budget in (before, after) for part in budget.parts if part.name == "CUDA graphs"}
    assert graphs == {True, False}
    assert before.beside == before.part("CUDA graphs").likely
    assert after.beside == 0
    assert before.part("activations").likely > after.part("activations").likely
    assert "CUDA graphs" not in {part.name for part in old.engine.budget(replace(old.situation, eager=True)).parts}


def test_defaults_by_device() -> None:
    h100 = EngineSettings(8192, compute_capability=90, device_memory_bytes=79 * GIB)
    a100 = replace(h100, compute_capability=80)
    small = replace(h100, device_memory_bytes=24 * GIB)
    assert [default_max_num_seqs(s, None) for s in (h100, a100, small)] == [1024, 256, 256]
    assert [default_batched_tokens(s, None) for s in (h100, a100, small)] == [8192, 2048, 2048]
    assert default_batched_tokens(h100, (0, 6)) == 8192 == h100.max_model_len  # V0 profiles a whole prompt
    assert default_batched_tokens(replace(h100, max_model_len=40000), (0, 6)) == 2048
    assert default_batched_tokens(replace(h100, device_memory_bytes=180 * GIB), None) == 16384
    cpu = replace(small, device="cpu", tensor_parallel_size=2)
    assert (default_max_num_seqs(cpu, None), default_batched_tokens(cpu, None)) == (256, 4096)


@pytest.mark.parametrize(
    ("device", "capability"),
    [
        ("t4", 75),
        ("v100-32gb", 70),
        ("a100-80gb", 80),
        ("rtx-3090", 86),
        ("rtx-4090", 89),
        ("l40s", 89),
        ("h100", 90),
        ("gh200-96gb", 90),
        ("b200", 100),
        ("rtx-5090", 120),
        ("gb10", 121),
        ("jetson-agx-orin-64gb", 87),
        ("mi300x", 90),
    ],
)
def test_compute_capability(device: str, capability: int) -> None:
    assert compute_capability(find_device(device)) == capability


def test_weights_of_ranks_and_schemes() -> None:
    name = "Qwen/Qwen2.5-7B-Instruct"
    one, two = (weight_estimate(question(name, Wishes("h100", tp=tp, context=4096)).situation) for tp in (1, 2))
    tensors = 2 * 7_615_616_512
    assert one.low < tensors < one.likely < one.high < tensors * 1.01
    assert two.likely == pytest.approx(one.likely / 2, rel=0.01)
    awq = weight_estimate(question(name, Wishes("h100", context=4096, quantization="awq")).situation)
    assert awq.likely < 0.4 * one.likely
    assert awq.high / awq.likely > one.high / one.likely  # repacked by kernels: less certain


def test_mxfp4_rows_are_padded() -> None:
    """gpt-oss-20b and -120b in vLLM on an H100: 13.47 and 64.38 GiB of 12.82 and 60.77 in the files."""
    for name, loaded in (("openai/gpt-oss-20b", 13.47), ("openai/gpt-oss-120b", 64.38)):
        estimate = weight_estimate(question(name, Wishes("h100", context=4096)).situation)
        assert estimate.likely / GIB == pytest.approx(loaded, rel=0.005)


def test_a_config_too_thin_to_count_is_refused() -> None:
    asked = question(LLAMA, Wishes("h100", context=4096))
    bare = replace(asked.situation, geometry=replace(asked.geometry, parameters=None))
    with pytest.raises(UnsupportedModel, match="too little to count the weights"):
        weight_estimate(bare)


def test_spreads_add_as_squares() -> None:
    parts = (
        Part("a", Estimate(30, 27, 34, "x")),
        Part("b", Estimate(20, 16, 23, "x")),
        Part("beside", Estimate(7, 0, 99, "x"), inside=False),
    )
    budget = Budget(200, 100, "half", parts)
    assert (budget.available.likely, budget.available.low, budget.available.high) == (50, 45, 55)
    assert budget.beside == 7


needs_reports = pytest.mark.skipif(not FILE.exists(), reason="needs the start-up reports beside the checkout")


@needs_reports
def test_predictions_from_hardware_alone() -> None:
    """The goals: median error <= 4%, nine of ten within 12%, the interval right nine times in ten."""
    found = list(predict())
    assert len(found) >= 28
    errors = sorted(abs(item.error) for item in found)
    assert statistics.median(errors) <= 0.01
    assert errors[int(0.9 * len(errors))] <= 0.12
    assert sum(item.inside for item in found) / len(found) >= 0.9
    assert len({item.family for item in found}) >= 6
    assert len({item.version for item in found}) >= 12


@needs_reports
def test_intervals_are_not_so_wide_that_they_say_nothing() -> None:
    widths = [(item.high - item.low) / item.tokens for item in predict() if item.tokens > 100_000]
    assert statistics.median(widths) < 0.06


@needs_reports
def test_needed_figures_are_exact() -> None:
    found = list(needs())
    assert len(found) >= 10
    assert [need for need in found if not need.exact] == []


@needs_reports
def test_nothing_is_left_out_because_it_comes_out_badly() -> None:
    """Reasons depend on settings and remarks of a report, never on its figures."""
    for report in reports():
        blank = report | {"reported": dict.fromkeys(report["reported"])}
        assert left_out(blank) == left_out(report)
