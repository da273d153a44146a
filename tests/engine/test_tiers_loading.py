"""Tiers behind the engine's pool: loads that are slow, and what happens meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from anaphora.engine.engine import Engine
from anaphora.tiers.store import BlockMeta, Outcome
from support.engines import generate
from support.models import tiny_llama
from support.tiered_engines import ask, drain, engine_of, make_computing_slow, prefix, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def computing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    make_computing_slow(monkeypatch)


class Gate:
    """Lets the loads of a tier begin when it is opened."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, tier: str = "ram") -> None:
        assert engine.tiers is not None
        (store,) = [t.store for t in engine.tiers._hierarchy.tiers if t.store.name == tier]
        real, self.open, self.loads = store.load, threading.Event(), 0

        def load(blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
            self.loads += 1
            assert self.open.wait(30)
            return real(blocks, into)

        monkeypatch.setattr(store, "load", load)


@pytest.fixture
def gated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Gate, list[int], tuple[int, ...]]]:
    """An engine whose RAM tier has a prompt that the pool has not, its loads stopped; the prompt and its tokens."""
    prompt = prefix(9, 100)
    with engine_of(folder, ram_cache=1 << 20, num_blocks=40, max_model_len=192) as engine:
        expected = generate(engine, prompt)
        drain(engine)
        assert engine.reset_prefix_cache()
        gate = Gate(engine, monkeypatch)
        yield engine, gate, prompt, expected
        gate.open.set()
        drain(engine)
        engine.step()


Gated = tuple[Engine, Gate, list[int], tuple[int, ...]]


def test_others_run_while_one_loads_and_twins_wait(gated: Gated) -> None:
    engine, gate, prompt, expected = gated
    ask(engine, "a", prompt, 16)
    ask(engine, "twin", prompt, 16)
    ask(engine, "other", prefix(10, 30))
    made: dict[str, list[int]] = {}
    while "other" in {str(name) for name in engine.scheduler.requests}:
        for output in engine.step():
            made.setdefault(output.request_id, []).extend(output.token_ids)
        engine.cache.check_invariants()
    assert set(made) == {"other"}
    gate.open.set()
    rest = run(engine)
    assert rest["a"] == rest["twin"] == expected
    assert gate.loads == 1
    assert engine.stats.source_tokens["ram"] == 96


def test_an_abort_while_loading_frees_everything(gated: Gated) -> None:
    engine, gate, prompt, expected = gated
    ask(engine, "a", prompt)
    engine.step()
    assert engine.cache.num_active >= 6
    assert engine.abort("a")
    assert not engine.has_work
    assert engine.cache.num_active >= 6  # the tier still writes there
    gate.open.set()
    drain(engine)
    assert engine.cache.num_active == 0
    engine.cache.check_invariants()
    assert generate(engine, prompt) == expected


def test_a_load_that_is_late_is_computed(gated: Gated) -> None:
    engine, gate, prompt, expected = gated
    ask(engine, "a", prompt, 16)
    assert run(engine)["a"] == expected
    assert engine.stats.tier_decisions["late"] == 1
    ask(engine, "b", [*prompt, 1])  # the tier hangs: it is not asked again, what the pool has is used
    assert engine.reset_prefix_cache() is False
    run(engine)
    assert gate.loads == 1
    gate.open.set()
    drain(engine)
    assert engine.cache.num_active == 0


def test_a_reset_while_loading(gated: Gated) -> None:
    engine, gate, prompt, expected = gated
    ask(engine, "a", prompt, 16)
    engine.step()
    engine.reset_prefix_cache()
    gate.open.set()
    assert run(engine)["a"] == expected


def test_a_failed_step_of_another_leaves_the_load_alone(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, gate, prompt, expected = gated
    ask(engine, "a", prompt, 16)
    ask(engine, "other", prefix(11, 30))
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "step", lambda batch: 1 / 0)
        (output,) = engine.step()
    assert (output.request_id, output.finish_reason) == ("other", "error")
    gate.open.set()
    assert run(engine)["a"] == expected


def test_what_waits_behind_is_prefetched_into_ram(folder: Path, tmp_path: Path) -> None:
    prompt = prefix(12, 100)
    disk = {"disk_cache": f"{tmp_path}:8MiB"}
    with engine_of(folder, **disk) as engine:
        expected = generate(engine, prompt)
        drain(engine)
    with engine_of(folder, ram_cache=1 << 20, max_num_seqs=1, **disk) as engine:
        ask(engine, "first", prefix(13, 40), 60)
        ask(engine, "second", prompt, 16)
        assert run(engine)["second"] == expected
        sources = engine.stats.source_tokens
        assert (sources["ram"], sources["disk"]) == (96, 0)
