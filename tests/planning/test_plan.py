"""Plans: worked examples to the byte, ways out that hold what they promise, limits that are the last that fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.errors import ConfigError, HardwareNotFound
from anaphora.geometry.model import ModelGeometry
from anaphora.planning.anaphora_pool import NATIVE_FAMILIES
from anaphora.planning.ask import Wishes, ask
from anaphora.planning.engines import ENGINES
from anaphora.planning.hardware import find_device
from anaphora.planning.heatmap import page, svg
from anaphora.planning.offload import bus_rate, offload, prefill_flops
from anaphora.planning.plan import Question, answer, grid, longest_context, most_requests
from anaphora.planning.recommend import recommend, rule_of_thumb
from anaphora.planning.report import make_report
from anaphora.planning.ways_out import WayOut, ways_out
from anaphora.planning.workload import Workload, needed_bytes, requests_that_fit, shared_blocks

QWEN = "Qwen/Qwen2.5-7B-Instruct"
GIB = 1 << 30


def question(name: str = QWEN, **wishes: Any) -> Question:
    values: dict[str, Any] = {"hardware": "rtx-4090", "context": 32768, "concurrency": 16} | wishes
    return ask(name, ModelGeometry.from_catalog(name), Wishes(**values))[0]


def test_the_worked_example() -> None:
    """16 requests of 32,768 tokens: 28 GiB, more than a 24 GB card has."""
    now = answer(question())
    assert now.capacity.block_bytes == 16 * 57_344
    assert now.capacity.request_bytes == 1_879_048_192  # 1.75 GiB
    assert now.needed_bytes == 28 * GIB + now.capacity.block_bytes  # and vLLM's null block
    assert not now.fits
    assert now.weights_fit
    assert now.requests == (now.capacity.num_blocks - 1) // 2048 == 4
    eight = answer(question(context=8192, concurrency=1))
    assert eight.capacity.request_bytes == 469_762_048  # 448 MiB
    assert eight.fits
    assert eight.surely


def test_half_the_bytes_in_fp8_and_int8_with_its_scales() -> None:
    assert answer(question(kv_dtype="fp8")).capacity.request_bytes == 1_879_048_192 // 2
    int8 = answer(question(kv_dtype="int8")).capacity
    assert int8.block_bytes == 16 * 28 * 4 * (2 * 128 + 2 * 4)  # a float32 scale for each key and each value


def test_the_users_configuration() -> None:
    """float16, 0.90, 16 sequences of 32,768 on 24 GB: refused, with what does fit."""
    asked = question(dtype="float16", utilization=0.9, engine="vllm")
    assert answer(asked).requests < 16
    longest = longest_context(asked)
    assert answer(asked.changed(context=longest)).fits
    assert not answer(asked.changed(context=longest + 16)).fits


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("prefix", [0, 2000])
def test_limits_are_the_last_that_fit(engine: str, prefix: int) -> None:
    asked = question(engine=engine, context=8192, concurrency=3, shared_prefix=prefix, hardware="rtx-4090")
    most = most_requests(asked)
    assert most > 0
    assert answer(asked.changed(concurrency=most)).fits
    assert not answer(asked.changed(concurrency=most + 1)).fits
    longest = longest_context(asked, 64)
    assert longest > 0
    if longest < 32768:
        available = asked.engine.budget(asked.situation).available.likely
        for length, fits in ((longest, True), (longest + 256, False)):
            at = asked.changed(context=length, shared_prefix=min(prefix, length - 1))
            capacity = asked.engine.capacity(at.situation, available)
            assert (requests_that_fit(capacity, min(prefix, length - 1)) >= 64) is fits


def test_what_a_shared_prefix_saves() -> None:
    """2,000 tokens are 125 whole blocks, held once instead of 16 times."""
    alone, shared = answer(question()), answer(question(shared_prefix=2000))
    assert shared_blocks(shared.capacity, 2000) == 125
    assert shared.saved_bytes == 15 * 125 * 16 * 57_344 == alone.needed_bytes - shared.needed_bytes
    assert shared_blocks(shared.capacity, 15) == 0
    hybrid = answer(question("Qwen/Qwen3.5-9B", context=8192, shared_prefix=527))
    assert hybrid.capacity.reuse_step == 528
    assert hybrid.saved_bytes == 0  # shorter than a block of 528 tokens: never reused
    longer = answer(question("Qwen/Qwen3.5-9B", context=8192, shared_prefix=528))
    assert longer.saved_bytes > 0
    slots = answer(question(engine="llama.cpp", shared_prefix=2000))
    assert slots.saved_bytes == 0  # a slot shares no cells with another


def test_needed_bytes_is_what_fitting_takes() -> None:
    """With exactly the needed bytes the requests fit, with a block less they do not."""
    for name in (QWEN, "google/gemma-3-27b-it", "Qwen/Qwen3.5-9B"):
        asked = question(name, context=16384, concurrency=5, shared_prefix=3000, engine="vllm")
        needed = answer(asked).needed_bytes
        for available, fits in ((needed, True), (needed - 1, False)):
            capacity = asked.engine.capacity(asked.situation, available)
            assert (requests_that_fit(capacity, 3000) >= 5) is fits
            assert needed_bytes(capacity, 5, 3000) == needed


def check(way: WayOut) -> None:
    """A way out that is called enough holds the workload it names."""
    asked = way.answer.question
    assert way.enough == (way.answer.requests >= asked.workload.concurrency and way.answer.weights_fit)
    again = answer(asked)
    assert (again.requests, again.needed_bytes) == (way.answer.requests, way.answer.needed_bytes)


def test_ways_out_come_true() -> None:
    asked = question()
    found = ways_out(asked)
    assert [way.enough for way in found] == sorted((way.enough for way in found), reverse=True)
    for way in found:
        check(way)
    options = [way.settings for way in found]
    assert {"kv_dtype": "fp8"} in options
    assert {"quantization": "awq"} in options
    assert {"utilization": 0.95} in options
    assert any("concurrency" in option for option in options)
    assert any("context" in option for option in options)
    two = next(way for way in found if way.settings == {"count": 2, "tp": 2})
    assert two.answer.capacity.block_bytes == 16 * 57_344 // 2
    larger = next(way for way in found if "hardware" in way.settings)
    assert larger.enough
    assert (find_device(larger.settings["hardware"]).memory_bytes or 0) > (find_device("rtx-4090").memory_bytes or 0)


def test_options_of_a_way_out_make_the_same_plan() -> None:
    """Typing what it says gives what it promised."""
    for way in ways_out(question()):
        typed = answer(question(**way.settings))
        assert (typed.requests, typed.available_bytes) == (way.answer.requests, way.answer.available_bytes), way.change


def test_weights_that_do_not_fit() -> None:
    asked = question("meta-llama/Llama-3.3-70B-Instruct", context=8192, concurrency=1)
    report = make_report(asked, [])
    assert not report.answer.weights_fit
    assert report.weights_missing == -report.answer.budget.available.likely > 100 * GIB
    assert report.longest_context == report.most_requests == 0
    assert report.recommended == ()
    enough = [way.change for way in report.ways_out if way.enough]
    assert "2 x GeForce RTX 4090 with 4-bit (AWQ) weights" in enough
    assert report.smallest_weights is not None
    assert report.smallest_weights[1] < 0.3 * 2 * 70e9


def test_our_own_engine_points_to_one_that_reads_quantised_files() -> None:
    asked = question(engine="anaphora", hardware="epyc-genoa-16gb", context=4096, concurrency=1)
    found = ways_out(asked)
    enough = [way.settings for way in found if way.enough]
    assert enough[0] == {"kv_dtype": "int8"}
    assert {"engine": "llama.cpp", "quantization": "q8_0"} in enough


def test_recommendations() -> None:
    asked = question("meta-llama/Llama-3.1-8B-Instruct", context=4096, concurrency=8)
    settings_ = {item.name: item.value for item in recommend(asked, answer(asked))}
    assert settings_ == {
        "max_model_len": "5120",  # 1.2 x 4,096 up to a multiple of 256, and it fits
        "max_num_seqs": "8",
        "gpu_memory_utilization": "0.92",
        "block_size": "16",
    }
    tight = question()
    found = {item.name: item for item in recommend(tight, answer(tight))}
    assert found["max_num_seqs"].value == "4"
    hybrid = question("Qwen/Qwen3.5-9B", context=4096, concurrency=1)
    assert "under 528 tokens is never reused" in recommend(hybrid, answer(hybrid))[-1].why


def test_the_rule_of_thumb_is_judged() -> None:
    end = question()
    assert "the model ends at 32,768" in rule_of_thumb(end, answer(end)).verdict
    loose = question(context=4096, concurrency=2)
    assert "costs nothing" in rule_of_thumb(loose, answer(loose)).verdict
    slots = question(context=8192, concurrency=4, engine="llama.cpp")
    rule = rule_of_thumb(slots, answer(slots))
    assert "costs memory" in rule.verdict
    assert rule.requests < answer(slots).requests


def test_grid() -> None:
    contexts, concurrencies, rows = found = grid(question(shared_prefix=2000))
    assert contexts[-1] == 32768
    assert concurrencies == (1, 2, 4, 8, 16, 32, 64)
    for row in rows:
        assert list(row) == sorted(row)
    for column in zip(*rows, strict=True):
        assert list(column) == sorted(column)
    at = answer(question(shared_prefix=2000))
    assert rows[-1][4] == at.needed_bytes / at.available_bytes
    picture = svg(found, "a < b")
    assert picture.count("<rect") == len(contexts) * len(concurrencies)
    assert "a &lt; b" in picture
    whole = page(found, "t", ["x & y"])
    assert "x &amp; y" in whole
    assert "<script" not in whole
    assert "http" not in whole.replace("http://www.w3.org/2000/svg", "")


def test_offload_times() -> None:
    """A 7B's 4,000 tokens: 229 MB over PCIe 4.0 x16 against 61 TFLOP of prefill."""
    geometry, device = ModelGeometry.from_catalog(QWEN), find_device("rtx-4090")
    assert bus_rate(device) == pytest.approx(31.5e9, rel=0.01)
    assert prefill_flops(geometry, 4000) == pytest.approx(2 * 4000 * 6.53e9 + 4000 * 28 * 4 * 28 * 128 * 2000, rel=0.01)
    found = offload(geometry, device, 4000, 4000 * 57_344)
    assert found.ram_seconds == pytest.approx(0.0091, rel=0.02)
    assert found.pays is True
    assert bus_rate(find_device("gb10")) is None
    assert offload(geometry, find_device("m3-max-64gb"), 4000, 1).pays is None


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"context": 131072}, r"beyond this model's limit of 32768 tokens \(max_position_embeddings\)\. Use 32768"),
        ({"context": 10**20, "allow_long": True}, r"--context is 1.*give 1,073,741,824 or less"),
        ({"concurrency": 10**12}, r"--concurrency is 1.*give 1,073,741,824 or less"),
        ({"max_num_seqs": 10**12}, r"max_num_seqs is 1"),
        ({"pp": 29}, r"the model has 28 layers"),
        ({"count": 10**6}, r"--count is 1000000; give a whole number from 1 to 4,096"),
        ({"block_size": 8}, r"multiples of 16"),
        ({"context": 0}, r"--context is 0"),
        ({"concurrency": -3}, r"--concurrency is -3"),
        ({"shared_prefix": 32768}, r"shorter than the context"),
        ({"utilization": 0}, r"is 0; it is a part of the memory, above 0 and at most 1$"),
        ({"utilization": 90}, r"for 90% write 0\.9"),
        ({"utilization": -0.1}, r"above 0 and at most 1"),
        ({"count": 0}, r"--count is 0"),
        ({"count": 4, "tp": 2}, r"does not match --tp 2"),
        ({"engine": "llama.cpp", "tp": 2}, r"llama\.cpp has no --tp"),
        ({"engine": "anaphora", "count": 2}, r"one device"),
        ({"engine_version": "new"}, r"write for example 0\.11"),
        ({"dtype": "fp4"}, r"--dtype is 'fp4'"),
        ({"quantization": "q5"}, r"quantization 'q5' is not known"),
        ({"max_num_seqs": 0}, r"max_num_seqs is 0"),
        ({"max_num_batched_tokens": -1}, r"max_num_batched_tokens is -1"),
        ({"engine": "tgi"}, r"engine 'tgi' is not known"),
        ({"tp": 8}, r"28 attention heads"),
    ],
)
def test_impossible_wishes_name_what_would_do(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        answer(question(**wishes))


def test_limits_are_named() -> None:
    deepseek = ModelGeometry.from_catalog("deepseek-ai/DeepSeek-V3")
    assert deepseek.max_position_from == "max_position_embeddings, which holds its yarn rope scaling already"
    phi = "microsoft/Phi-3.5-mini-instruct"
    with pytest.raises(ConfigError, match=r"beyond 4096, the length .*LongRoPE.*up to 131072"):
        question(phi, context=100_000)
    assert question(phi, context=100_000, allow_long=True).workload.context == 100_000
    with pytest.raises(HardwareNotFound, match="nearest names: rtx-4090"):
        question(hardware="rtx-4099")


def test_a_context_beyond_the_limit_is_planned_with_a_warning_and_no_room_above_it() -> None:
    wishes = Wishes(hardware="rtx-4090", context=40_960, allow_long=True)
    asked, remarks = ask(QWEN, ModelGeometry.from_catalog(QWEN), wishes)
    assert any("beyond this model's limit of 32,768" in remark for remark in remarks)
    assert "the model ends at 32,768 tokens" in rule_of_thumb(asked, answer(asked)).verdict


def test_fewer_sequences_than_requests_is_said() -> None:
    wishes = Wishes(hardware="rtx-4090", context=4096, concurrency=8, max_num_seqs=2)
    assert any("runs 2 at once" in remark for remark in ask(QWEN, ModelGeometry.from_catalog(QWEN), wishes)[1])


def test_weights_beyond_eight_of_the_same_card_name_what_would_do() -> None:
    """DeepSeek-V3's 627 GiB: no eight H100 hold them, several of a larger card do."""
    enough = [way for way in ways_out(question("deepseek-ai/DeepSeek-V3", hardware="h100", context=8192)) if way.enough]
    assert enough
    assert enough[0].settings["count"] == enough[0].settings["tp"] > 1
    again = question("deepseek-ai/DeepSeek-V3", **{"context": 8192, **enough[0].settings})
    assert answer(again).requests == enough[0].answer.requests >= 16


def test_defaults_by_hardware() -> None:
    names = {
        device: question(hardware=device, context=1024, concurrency=1).engine.name
        for device in ("rtx-4090", "mi300x", "gb10", "m3-max-64gb", "epyc-genoa-64gb")
    }
    assert list(names.values()) == ["vllm", "vllm", "vllm", "llama.cpp", "anaphora"]


def test_dtypes_are_resolved() -> None:
    assert question(dtype="float32").situation.quantization == "float32"
    gemma = "google/gemma-2-9b-it"  # a checkpoint in float32, which vLLM loads in 16 bits
    geometry = ModelGeometry.from_catalog(gemma)
    if geometry.quantization is not None and geometry.quantization.rest == 32:
        assert question(gemma, context=1024).situation.quantization == "bfloat16"
    scaled = "nvidia/Gemma-4-31B-IT-NVFP4"
    asked, remarks = ask(scaled, ModelGeometry.from_catalog(scaled), Wishes("h100", context=4096))
    assert asked.settings.kv_cache_dtype == "fp8"
    assert any("brings scales" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("name", "block_size", "width"),
    [(QWEN, None, 2), (QWEN, 8, 4), ("mistralai/Mixtral-8x7B-v0.1", None, 4)],
)
def test_a_cpu_without_bfloat16_runs_it_where_the_native_kernels_run(
    name: str, block_size: int | None, width: int
) -> None:
    asked = question(
        name, engine="anaphora", hardware="epyc-rome-64gb", context=1024, concurrency=1, block_size=block_size
    )
    assert asked.settings.model_dtype_bytes == width


def test_the_native_families_are_those_of_the_compact_decoder() -> None:
    from anaphora.engine.models.spec import FAMILIES

    assert set(FAMILIES) == NATIVE_FAMILIES


def test_changed_keeps_the_concurrency_and_the_sequences_together() -> None:
    asked = question()
    assert asked.changed(concurrency=3).settings.max_num_seqs == 3
    assert question(max_num_seqs=64).changed(concurrency=3).settings.max_num_seqs == 64
    assert asked.changed(context=4096).settings.max_model_len == 4096
    moved = asked.on(find_device("h100"), 4)
    assert (moved.settings.tensor_parallel_size, moved.settings.compute_capability) == (4, 90)


@settings(max_examples=40, deadline=None)
@given(
    engine=st.sampled_from(["vllm", "sglang", "llama.cpp", "transformers", "anaphora"]),
    context=st.integers(2, 30000),
    concurrency=st.integers(1, 40),
    prefix=st.integers(0, 30000),
)
def test_more_is_never_less(engine: str, context: int, concurrency: int, prefix: int) -> None:
    """More requests need more, longer ones too, a prefix never costs, and a larger card never holds fewer."""
    prefix = min(prefix, context - 1)
    asked = question(engine=engine, context=context, concurrency=concurrency, hardware="a100-80gb")
    now = answer(asked)
    assert answer(asked.changed(concurrency=concurrency + 1)).needed_bytes > now.needed_bytes
    assert answer(asked.changed(context=context + 256)).needed_bytes >= now.needed_bytes
    shared = answer(asked.changed(shared_prefix=prefix))
    assert shared.needed_bytes <= now.needed_bytes
    assert shared.requests >= now.requests
    assert now.requests_surely <= now.requests <= now.requests_perhaps
    narrow = replace(asked.workload, context=context)
    assert isinstance(narrow, Workload)
