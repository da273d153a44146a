"""What each type of KV cache holds, as `plan` shows it: the same blocks as the engine's."""

from __future__ import annotations

import pytest

from anaphora.geometry.kv_dtype import BlockMap, kv_dtype
from anaphora.geometry.layout import CacheLayout
from anaphora.geometry.model import ModelGeometry
from anaphora.planning.ask import Wishes, ask
from anaphora.planning.kv_types import kv_types
from anaphora.planning.report import as_json, make_report

QWEN = ModelGeometry.from_catalog("Qwen/Qwen2.5-7B-Instruct")


def question(**wishes: object):  # type: ignore[no-untyped-def]
    return ask("Qwen/Qwen2.5-7B-Instruct", QWEN, Wishes(hardware="l40s", context=8192, **wishes))[0]  # type: ignore[arg-type]


def test_types_of_our_own_engine_are_those_of_its_blocks() -> None:
    found = {each.name: each for each in kv_types(question(engine="anaphora"))}
    layout = CacheLayout.of(QWEN, 16)
    for name in ("int8", "fp8_e4m3", "k8v4", "int4"):
        assert found[name].block_bytes == BlockMap(layout, kv_dtype(name)).block_bytes
        assert found[name].tokens >= 1.9 * found["auto"].tokens or name == "int8"
    assert found["int8"].tokens / found["auto"].tokens == pytest.approx(16 / 8.5, rel=1e-3)
    assert [each.name for each in found.values() if each.chosen] == ["auto"]


def test_other_engines_have_their_own_types() -> None:
    assert [each.name for each in kv_types(question(engine="vllm"))] == ["auto", "fp8"]


def test_the_plan_counts_scales_and_writes_the_option() -> None:
    asked = question(engine="anaphora", kv_dtype="int8")
    found = as_json(make_report(asked, []), with_grid=False)
    assert found["kv"]["bytes_per_token"] == kv_dtype("int8").bytes_per_token(CacheLayout.of(QWEN, 16))
    assert [each["name"] for each in found["kv_types"] if each["chosen"]] == ["int8"]
