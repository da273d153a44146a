"""Real models: bytes per token, states and context, against vLLM's own figures and the catalogue."""

from __future__ import annotations

import pytest

from anaphora.errors import AnaphoraError
from anaphora.geometry.catalog import models
from anaphora.geometry.model import Keeps, ModelGeometry
from support.facts import Fact, facts


def test_the_table_is_large_enough_to_mean_something() -> None:
    assert len(facts()) >= 60


@pytest.mark.parametrize("fact", facts(), ids=lambda fact: fact.model)
def test_bytes_per_token_states_and_context(fact: Fact) -> None:
    geometry = ModelGeometry.from_config(fact.config)
    expected = fact.bytes_per_token
    if any(layer.keeps is Keeps.COMPRESSED for layer in geometry.layers):
        expected /= 479558.25 / 475312  # vLLM pads these pages to 576 bytes; the geometry counts what is kept
    assert geometry.bytes_per_token(2) == pytest.approx(expected, rel=1e-5)
    assert geometry.state_bytes(2) == fact.state_bytes
    assert (geometry.trained_position or geometry.max_position or 2048) == fact.context


def test_every_model_of_the_catalogue_can_be_sized() -> None:
    for model in models():
        geometry = ModelGeometry.from_config(model.config)
        assert geometry.sequence_bytes(4096) > 0, model.id
        assert not geometry.assumed_full_attention


def test_parameters_are_those_of_the_catalogue() -> None:
    """Counted from the config against published or class-counted numbers: exact for plain decoders, near for others."""
    errors = {}
    for model in models():
        parameters = ModelGeometry.from_config(model.config).parameters
        if model.parameters is not None:
            assert parameters is not None, model.id
            errors[model.id] = abs(parameters.total / model.parameters - 1)
    assert len(errors) > 250
    assert errors["Qwen/Qwen2.5-7B-Instruct"] == 0
    assert sum(error == 0 for error in errors.values()) > len(errors) // 2
    assert sum(error < 0.001 for error in errors.values()) > 0.9 * len(errors)
    assert max(errors.values()) < 0.03, max(errors, key=lambda name: errors[name])


def test_active_parameters_of_a_mixture() -> None:
    parameters = ModelGeometry.from_catalog("Qwen/Qwen3-30B-A3B").parameters
    assert parameters is not None
    assert 3.2e9 < parameters.active < 3.5e9 < 30e9 < parameters.total
    dense = ModelGeometry.from_catalog("Qwen/Qwen2.5-7B-Instruct").parameters
    assert dense is not None
    assert dense.active == dense.total


@pytest.mark.parametrize(
    ("name", "gib"),
    [  # sizes of the published checkpoints
        ("Qwen/Qwen2.5-7B-Instruct", 14.19),
        ("openai/gpt-oss-20b", 12.82),
        ("openai/gpt-oss-120b", 60.77),
        ("moonshotai/Kimi-K2.5", 553.4),
    ],
)
def test_weight_bytes_of_the_checkpoint(name: str, gib: float) -> None:
    size = ModelGeometry.from_catalog(name).weight_bytes()
    assert size is not None
    assert size / 2**30 == pytest.approx(gib, rel=0.01)


def test_weight_bytes_by_scheme() -> None:
    geometry = ModelGeometry.from_catalog("Qwen/Qwen2.5-7B-Instruct")
    sizes = [geometry.weight_bytes(name) or 0 for name in ("float32", "bfloat16", "int8", "nvfp4", "mxfp4", "awq")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] == 2 * 7_615_616_512 == geometry.weight_bytes()
    with pytest.raises(AnaphoraError, match=r"choose one of float32, .*awq"):
        geometry.weight_bytes("q5")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("nvidia/Gemma-4-31B-IT-NVFP4", "fp8"), ("poolside/Laguna-S-2.1-FP8", "fp8"), ("Qwen/Qwen3-8B-FP8", None)],
)
def test_a_checkpoint_may_bring_an_fp8_cache(name: str, dtype: str | None) -> None:
    assert ModelGeometry.from_catalog(name).checkpoint_kv_dtype == dtype
