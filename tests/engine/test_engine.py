"""The engine end to end on tiny weights: the same tokens however requests are batched, chunked, cached or preempted."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from anaphora.engine.engine import Engine
from anaphora.engine.params import SamplingParams
from anaphora.errors import ConfigError, ContextTooLong, CorruptModel, InvalidRequest
from anaphora.types import RequestId
from support.engines import GREEDY, generate, make_engine, run_all, tokens_of
from support.models import tiny_llama
from support.storage import needs_native

NUM_REQUESTS = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def workload() -> list[tuple[list[int], int]]:
    """(prompt, new tokens): many share a system prompt, some a document under it, some nothing."""
    rng = random.Random(7)
    system = [rng.randrange(256) for _ in range(53)]
    documents = [[rng.randrange(256) for _ in range(rng.randrange(5, 40))] for _ in range(4)]
    requests = []
    for _ in range(NUM_REQUESTS):
        own = [rng.randrange(256) for _ in range(rng.randrange(1, 20))]
        prefix = rng.choice([[], system, system, system + rng.choice(documents), rng.choice(documents)])
        requests.append((prefix + own, rng.randrange(1, 24)))
    return requests


@pytest.fixture(scope="module")
def expected(folder: Path, workload: list[tuple[list[int], int]]) -> Callable[[str], list[tuple[int, ...]]]:
    """Of a backend: one by one, no cache, whole prompt in one step."""

    @cache
    def tokens(backend: str) -> list[tuple[int, ...]]:
        engine = make_engine(folder, enable_prefix_caching=False, max_num_seqs=1, backend=backend)
        return [generate(engine, prompt, replace(GREEDY, max_tokens=n)) for prompt, n in workload]

    return tokens


def assert_idle(engine: Engine) -> None:
    engine.cache.check_invariants()
    assert engine.cache.num_active == 0
    assert engine.cache.num_free + engine.cache.num_cached == engine.config.num_blocks


@pytest.mark.parametrize(
    ("backend", "caching", "chunk", "block_size", "seqs", "num_blocks"),
    [
        ("torch", True, 512, 16, 64, 200),
        ("torch", True, 64, 16, 16, 12),
        ("torch", True, 9, 4, 9, 40),
        ("torch", True, 7, 1, 5, 160),
        ("torch", True, 33, 32, 32, 9),
        ("torch", False, 512, 16, 64, 200),
        ("torch", False, 64, 16, 16, 12),
        ("torch", False, 5, 8, 5, 24),
        pytest.param("native", True, 512, 16, 64, 200, marks=needs_native),
        pytest.param("native", True, 64, 16, 16, 12, marks=needs_native),
        pytest.param("native", True, 7, 32, 5, 9, marks=needs_native),
        pytest.param("native", False, 64, 16, 16, 12, marks=needs_native),
    ],
)
def test_the_same_tokens_as_one_by_one(
    folder: Path,
    workload: list[tuple[list[int], int]],
    expected: Callable[[str], list[tuple[int, ...]]],
    backend: str,
    caching: bool,
    chunk: int,
    block_size: int,
    seqs: int,
    num_blocks: int,
) -> None:
    """Requests arrive while others run and some are cancelled; small pools force preemption and eviction."""
    engine = make_engine(
        folder,
        num_blocks=num_blocks,
        backend=backend,
        enable_prefix_caching=caching,
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=chunk,
        max_model_len=144,
    )
    rng = random.Random(chunk)
    aborted: set[int] = set()
    made: dict[str, list[int]] = {str(i): [] for i in range(NUM_REQUESTS)}
    waiting = list(range(NUM_REQUESTS))
    while waiting or engine.has_work:
        for _ in range(rng.randrange(4)):
            if waiting:
                i = waiting.pop(0)
                prompt, n = workload[i]
                engine.add(str(i), prompt, replace(GREEDY, max_tokens=n))
        for output in engine.step():
            made[output.request_id] += output.token_ids
        if engine.has_work and rng.random() < 0.05:
            victim = rng.choice(list(engine.scheduler.requests))
            assert engine.abort(victim)
            aborted.add(int(victim))
        engine.cache.check_invariants()
    assert_idle(engine)
    for i, tokens in enumerate(expected(backend)):
        got = tuple(made[str(i)])
        assert got == (tokens[: len(got)] if i in aborted else tokens), f"request {i}"
    assert len(aborted) > 0
    assert engine.stats.finished == {"length": NUM_REQUESTS - len(aborted), "abort": len(aborted)}
    if num_blocks < 50:
        assert engine.stats.preemptions > 0
    if caching:
        assert engine.stats.prefix_hits > 0
        assert num_blocks >= 200 or engine.stats.evictions > 0
    else:
        assert engine.stats.prefix_hits == 0
        assert engine.cache.num_cached == 0


def test_reuse_is_exact_to_the_token(folder: Path) -> None:
    engine = make_engine(folder, num_blocks=64)
    prompt = list(range(100))
    first = generate(engine, prompt)
    engine.add("again", prompt, GREEDY)
    again = run_all(engine)["again"]
    assert tokens_of(again) == first
    assert again[-1].num_cached_tokens == 99  # all but the one token whose logits are needed
    engine.add("half", [*prompt[:57], 200, 201], GREEDY)
    assert run_all(engine)["half"][-1].num_cached_tokens == 57
    conversation = [*prompt, *first, 7, 8, 9]
    engine.add("turn", conversation, GREEDY)
    # the last new token's KV was never computed
    assert run_all(engine)["turn"][-1].num_cached_tokens == 100 + 16 - 1
    assert_idle(engine)


def test_a_concurrent_twin_waits_instead_of_computing_again(folder: Path) -> None:
    engine = make_engine(folder, num_blocks=64, max_num_batched_tokens=64)
    prompt = list(range(160))
    for name in ("a", "b", "c"):
        engine.add(name, prompt, GREEDY)
    outputs = run_all(engine)
    assert tokens_of(outputs["a"]) == tokens_of(outputs["b"]) == tokens_of(outputs["c"])
    assert [outputs[name][-1].num_cached_tokens for name in "abc"] == [0, 159, 159]
    assert engine.stats.computed_tokens == 160 + 15 + 2 * 16


def test_who_waits_for_a_twin_keeps_the_sequence_that_is_its_due(folder: Path) -> None:
    engine = make_engine(folder, num_blocks=64, max_num_seqs=2, max_num_batched_tokens=64)
    for name, prompt in (("first", range(40)), ("twin", range(40)), ("other", range(100, 110))):
        engine.add(name, list(prompt), GREEDY)
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["first"]
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["first", "twin"]
    run_all(engine)


def test_who_waits_for_a_twin_keeps_the_blocks_that_are_its_due(folder: Path) -> None:
    """Of 10 blocks the first takes 5 (70 tokens); its longer twin will share 4 of them and want 3 more."""
    engine = make_engine(folder, num_blocks=10, max_num_batched_tokens=256, max_model_len=128)
    for name, prompt in (("first", range(70)), ("twin", range(100)), ("other", range(100, 148))):
        engine.add(name, list(prompt), GREEDY)
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["first"]
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["first", "twin"]
    assert engine.scheduler.requests[RequestId("twin")].num_cached_tokens == 64
    run_all(engine)


def test_a_model_that_computes_nan_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"rms_norm_eps": -1.0}))
    with pytest.raises(CorruptModel, match=r"config\.json does not belong"):
        make_engine(broken)


def test_salts_keep_tenants_apart(folder: Path) -> None:
    engine = make_engine(folder, num_blocks=64)
    prompt = list(range(64))
    for salt, cached in (("one", 0), ("two", 0), ("one", 63), (None, 0)):
        engine.add("r", prompt, GREEDY, cache_salt=salt)
        assert run_all(engine)["r"][-1].num_cached_tokens == cached


def test_the_oldest_request_finishes_first_under_pressure(folder: Path) -> None:
    """Three long requests in a pool that holds one and a half: the oldest is never preempted."""
    engine = make_engine(folder, num_blocks=12, max_model_len=128, enable_prefix_caching=False)
    for i in range(3):
        engine.add(str(i), [i] * 60, replace(GREEDY, max_tokens=60))
    order = [o.request_id for outputs in [engine.step() for _ in range(400)] for o in outputs if o.finish_reason]
    assert order == ["0", "1", "2"]
    assert engine.stats.preemptions > 0
    assert_idle(engine)


def test_a_seed_gives_the_same_text_whatever_else_runs(folder: Path) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=24, seed=1234, ignore_eos=True)
    prompt = list(range(40))
    alone = generate(make_engine(folder, num_blocks=64), prompt, params)
    engine = make_engine(folder, num_blocks=16, max_model_len=128, max_num_batched_tokens=32, max_num_seqs=32)
    for i in range(12):
        engine.add(f"other-{i}", list(range(i, i + 30)), replace(params, seed=i))
    engine.add("ours", prompt, params)
    assert tokens_of(run_all(engine)["ours"]) == alone
    assert engine.stats.preemptions > 0


def test_abort_frees_blocks_at_once(folder: Path) -> None:
    engine = make_engine(folder, num_blocks=64, enable_prefix_caching=False)
    engine.add("a", list(range(100)), replace(GREEDY, max_tokens=200))
    for _ in range(3):
        engine.step()
    assert engine.cache.num_active > 0
    assert engine.abort("a")
    assert not engine.abort("a")
    assert engine.cache.num_free == 64
    assert not engine.has_work


def test_stop_string_ends_without_leaking(folder: Path) -> None:
    engine = make_engine(folder, num_blocks=64)
    free = "".join(o.text for o in _text(engine, GREEDY))
    stop = free[5:8]
    outputs = _text(engine, replace(GREEDY, stop=(stop,)))
    assert "".join(o.text for o in outputs) == free[: free.index(stop)]
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_reason == stop


def _text(engine: Engine, params: SamplingParams) -> list:  # type: ignore[type-arg]
    engine.add("text", engine.tokenizer.encode("Once upon a time"), params)
    return run_all(engine)["text"]


def test_a_broken_step_ends_its_requests_and_the_engine_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folder, num_blocks=64)
    fine = generate(engine, list(range(50)))

    def broken(batch: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "step", broken)
        engine.add("a", list(range(50)), GREEDY)
        (output,) = engine.step()
    assert output.finish_reason == "error"
    assert "out of memory" in (output.error or "")
    assert_idle(engine)
    assert generate(engine, list(range(50))) == fine


@pytest.mark.parametrize(
    ("prompt", "params", "error", "says"),
    [
        ([], GREEDY, InvalidRequest, "no tokens"),
        ([1, 999], GREEDY, InvalidRequest, "999"),
        ([-1], GREEDY, InvalidRequest, "-1"),
        ([1] * 512, GREEDY, ContextTooLong, "512"),
        ([1] * 500, replace(GREEDY, max_tokens=13), ContextTooLong, "Lower max_tokens to 12"),
    ],
)
def test_requests_that_cannot_run_are_refused_at_once(
    folder: Path, prompt: list[int], params: SamplingParams, error: type[Exception], says: str
) -> None:
    engine = make_engine(folder, num_blocks=64)
    with pytest.raises(error, match=says):
        engine.add("bad", prompt, params)
    assert not engine.has_work


def test_a_pool_too_small_for_the_context_is_refused_at_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match="Raise --kv-memory"):
        make_engine(folder, num_blocks=4, max_model_len=512)
