"""Tiers behind the engine's pool: the same tokens, whatever comes from where, and nothing leaks."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Gemma2Config

from anaphora.errors import ConfigError
from support.engines import GREEDY, generate, make_engine
from support.models import save_byte_tokenizer, save_tiny_model, tiny_llama
from support.remote import valkey
from support.tiered_engines import ask, drain, engine_of, make_computing_slow, prefix, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 2 of four layers, every other one with a window."""
    folder = tmp_path_factory.mktemp("windows")
    config = Gemma2Config(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        sliding_window=24,
        query_pre_attn_scalar=8,
        eos_token_id=256,
        bos_token_id=None,
    )
    return save_byte_tokenizer(save_tiny_model(folder, config))


@pytest.fixture(autouse=True)
def computing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    make_computing_slow(monkeypatch)


def prompts_of(seed: int, count: int) -> list[list[int]]:
    """Half of them share their first 64 tokens with some other."""
    rng = random.Random(seed)
    stems = [[rng.randrange(256) for _ in range(64)] for _ in range(4)]
    return [
        (rng.choice(stems) if rng.random() < 0.5 else []) + [rng.randrange(256) for _ in range(rng.randrange(20, 86))]
        for _ in range(count)
    ]


# The same tokens


@pytest.mark.parametrize("policy", ["write-through", "on-eviction"])
@pytest.mark.parametrize("tiers", ["ram", "disk", "remote", "ram disk", "disk remote", "ram disk remote"])
@pytest.mark.parametrize("model", ["llama", "windows"])
def test_the_same_tokens_with_every_combination(
    folder: Path, windowed: Path, tmp_path: Path, model: str, tiers: str, policy: str
) -> None:
    """The pool holds two requests; everything is asked for twice, so that what was evicted comes back from a tier."""
    if policy == "on-eviction" and "ram" not in tiers:
        pytest.skip("goes through RAM")
    path = folder if model == "llama" else windowed
    prompts = prompts_of(5, 12)
    plain = make_engine(path, enable_prefix_caching=False, max_num_seqs=1)
    expected = [generate(plain, prompt, replace(GREEDY, max_tokens=8)) for prompt in prompts]
    with valkey() if "remote" in tiers else nullcontext() as server:
        given: dict[str, dict[str, object]] = {
            "ram": {"ram_cache": 1 << 20},
            "disk": {"disk_cache": f"{tmp_path}:8MiB"},
            "remote": {"remote_cache": f"valkey://127.0.0.1:{server.port if server else 0}/0"},
        }
        settings: dict[str, object] = {"cache_write_policy": policy}
        for tier in tiers.split():
            settings |= given[tier]
        with engine_of(path, num_blocks=40, max_num_seqs=4, max_model_len=192, **settings) as engine:
            for _ in range(2):
                for i, prompt in enumerate(prompts):
                    ask(engine, str(i), prompt)
                made = run(engine)
                assert [made[str(i)] for i in range(len(prompts))] == expected
                drain(engine)
            sources = engine.stats.source_tokens
            assert sum(sources.get(tier, 0) for tier in tiers.split()) > 100, sources
            assert engine.stats.evictions


def test_real_weights_give_the_same_tokens(smollm2: Path, tmp_path: Path) -> None:
    """Bit for bit what was stored: text from a prefix that came from RAM, then from disk after a restart."""
    prompt = prefix(1, 150)
    plain = make_engine(smollm2, enable_prefix_caching=False, max_model_len=256)
    expected = generate(plain, prompt)
    settings: dict[str, object] = {"disk_cache": f"{tmp_path}:64MiB", "max_model_len": 256}
    for tier in ("ram", "disk"):
        with engine_of(smollm2, ram_cache=32 << 20, **settings) as engine:
            for _ in range(2):
                assert engine.reset_prefix_cache()
                ask(engine, "a", prompt, 16)
                assert run(engine)["a"] == expected
                drain(engine)
            assert engine.stats.source_tokens[tier] >= 144


def test_after_a_restart_the_prefix_is_warm_from_disk(folder: Path, tmp_path: Path) -> None:
    prompt = prefix(2, 100)
    expected = generate(make_engine(folder, enable_prefix_caching=False), prompt)
    for computed in (100, 4):
        with engine_of(folder, disk_cache=f"{tmp_path}:8MiB") as engine:
            assert generate(engine, prompt) == expected
            assert engine.stats.source_tokens["computed"] == computed
            drain(engine)


@pytest.mark.parametrize("model", ["llama", "windows"])
@pytest.mark.parametrize("length", [63, 64, 65])
def test_one_token_is_always_computed(folder: Path, windowed: Path, model: str, length: int) -> None:
    """Also of a prompt of whole blocks: the last of them is loaded, and used but for its last token."""
    prompt = prefix(3, length)
    with engine_of(folder if model == "llama" else windowed, ram_cache=1 << 20) as engine:
        expected = generate(engine, prompt)
        drain(engine)
        assert engine.reset_prefix_cache()
        assert generate(engine, prompt) == expected
        assert engine.stats.source_tokens["ram"] == {63: 48, 64: 63, 65: 64}[length]
        assert generate(engine, prompt) == expected  # from the pool: nothing is asked of anybody
        assert engine.stats.source_tokens["pool"] == length - 1
        assert engine.stats.tier_decisions == {"nothing": 2, "load": 1}


def test_sources_add_up_to_the_prompt(folder: Path) -> None:
    head, prompt = prefix(4, 50), prefix(4, 50) + prefix(5, 60)
    with engine_of(folder, ram_cache=1 << 20) as engine:
        generate(engine, prompt)
        drain(engine)
        assert engine.reset_prefix_cache()
        generate(engine, head)  # 3 blocks and 2 tokens more: computed, or loaded; then in the pool
        engine.add("mixed", prompt, GREEDY)
        *_, last = (output for _ in iter(lambda: engine.has_work, False) for output in engine.step())
        assert last.sources is not None
        tokens = {name: source.tokens for name, source in last.sources.items()}
        assert tokens == {"pool": 48, "ram": 48, "disk": 0, "remote": 0, "computed": 14}
        assert all(source.seconds > 0 for _, source in last.sources.items() if source.tokens)


@pytest.mark.parametrize(
    "other",
    [{"dtype": "bfloat16"}, {"kv_cache_dtype": "fp16"}, {"block_size": 32}, {"backend": "torch"}, "weights", "salt"],
)
def test_what_is_not_the_same_never_matches(
    folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, other: object
) -> None:
    prompt = prefix(6, 100)
    disk = {"disk_cache": f"{tmp_path}:8MiB"}
    with engine_of(folder, **disk) as engine:
        generate(engine, prompt)
        drain(engine)
    path = tiny_llama(tmp_path_factory.mktemp(folder.name), seed=1) if other == "weights" else folder
    with engine_of(path, **disk, **(other if isinstance(other, dict) else {})) as engine:
        engine.add("a", prompt, GREEDY, cache_salt="tenant" if other == "salt" else None)
        run(engine)
        assert engine.stats.source_tokens["computed"] == 100
        assert engine.stats.tier_decisions == {"nothing": 1}


def test_damaged_files_are_computed_again(folder: Path, tmp_path: Path) -> None:
    prompt = prefix(7, 100)
    with engine_of(folder, disk_cache=f"{tmp_path}:8MiB") as engine:
        expected = generate(engine, prompt)
        drain(engine)
    for path in tmp_path.rglob("seg-*"):
        data = bytearray(path.read_bytes())
        for i in range(4096 + 4096, len(data), 997):  # slots; the tables stay, so that the blocks are found
            data[i] ^= 0x40
        path.write_bytes(data)
    with engine_of(folder, disk_cache=f"{tmp_path}:8MiB") as engine:
        assert generate(engine, prompt) == expected
        assert engine.stats.source_tokens["computed"] == 100
        tiers = engine.stats.tiers()
        assert tiers["disk"]["corrupt"] > 0
        assert tiers["disk"]["hits"] == 0


def test_a_disk_that_cannot_be_used_costs_its_tier_only(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with engine_of(folder, disk_cache=f"{tmp_path}/file/kv:8MiB", ram_cache=1 << 20) as engine:
        assert "without a disk cache" in caplog.text
        assert len(generate(engine, prefix(8, 40))) == 16
        assert engine.stats.tiers()["disk"] == {"up": 0.0}


# Preemption


@pytest.mark.parametrize("policy", ["write-through", "on-eviction"])
@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
def test_preempted_requests_go_on_with_the_same_tokens(folder: Path, preemption: str, policy: str) -> None:
    prompts = [prefix(20 + i, 40) for i in range(4)]
    plain = make_engine(folder, enable_prefix_caching=False, max_num_seqs=1)
    expected = [generate(plain, prompt, replace(GREEDY, max_tokens=40)) for prompt in prompts]
    settings = {"preemption": preemption, "cache_write_policy": policy, "ram_cache": 1 << 20}
    with engine_of(folder, num_blocks=14, max_num_seqs=4, max_model_len=128, **settings) as engine:
        for i, prompt in enumerate(prompts):
            ask(engine, str(i), prompt, 40)
        made = run(engine)
        assert [made[str(i)] for i in range(4)] == expected
        assert engine.scheduler.preemptions
        hits = engine.stats.tiers()["ram"]["hits"]
        assert hits == 0 if preemption == "recompute" else hits > 0


@pytest.mark.parametrize("seed", range(3))
def test_arrivals_and_aborts_at_any_moment_leak_nothing(folder: Path, tmp_path: Path, seed: int) -> None:
    rng, prompts = random.Random(seed), prompts_of(seed, 30)
    tiers = {"ram_cache": 96 << 10, "disk_cache": f"{tmp_path}:1MiB"}
    with engine_of(
        folder, num_blocks=24, max_num_seqs=4, max_num_batched_tokens=48, max_model_len=192, **tiers
    ) as engine:
        waiting = [(f"{i}-{turn}", prompt) for turn in range(3) for i, prompt in enumerate(prompts)]
        while waiting or engine.has_work:
            for _ in range(rng.randrange(3)):
                if waiting:
                    ask(engine, *waiting.pop(0))
            engine.step()
            if engine.has_work and rng.random() < 0.1:
                engine.abort(rng.choice(list(engine.scheduler.requests)))
            engine.cache.check_invariants()
        drain(engine)
        assert engine.cache.num_active == 0
        assert engine.stats.tiers()["disk"]["used_bytes"] <= 1 << 20


# Settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ram_cache": 100}, "holds no block"),
        ({"disk_cache": "kv"}, "needs a folder and a size"),
        ({"disk_cache": "kv:much"}, "must end with a size"),
        ({"disk_cache": "kv:1KiB"}, "holds no block of this model"),
        ({"remote_cache": "ftp://somewhere"}, "ftp"),
        ({"ram_cache": 1 << 20, "enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"ram_cache": 1 << 50}, "--ram-cache"),
        ({"preemption": "swap"}, "add --ram-cache"),
        ({"preemption": "wait"}, "must be one of"),
        ({"ram_cache": 1 << 20, "ram_eviction_policy": "random"}, "--ram-eviction-policy is 'random'; it must be one"),
        (
            {"disk_cache": "kv:8MiB", "disk_eviction_policy": "x"},
            "--disk-eviction-policy is 'x'; it must be one of lru",
        ),
        ({"ram_eviction_policy": "lru"}, "--ram-eviction-policy lru: add --ram-cache"),
        ({"ram_cache": 1 << 20, "disk_eviction_policy": "arc"}, "--disk-eviction-policy arc: add --disk-cache"),
        ({"cache_write_policy": "on-eviction"}, "add --ram-cache"),
        ({"cache_write_policy": "never"}, "must be one of"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        make_engine(folder, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "ram", "disk"),
    [
        ({}, "hazard", "hazard"),
        ({"eviction_policy": "lfu"}, "lfu", "lfu"),
        ({"eviction_policy": "lfu", "disk_eviction_policy": "lru"}, "lfu", "lru"),
        ({"ram_eviction_policy": "arc"}, "arc", "hazard"),
    ],
)
def test_tiers_evict_as_the_pool_does_unless_told_otherwise(
    folder: Path, tmp_path: Path, settings: dict[str, str], ram: str, disk: str
) -> None:
    with engine_of(folder, ram_cache=1 << 20, disk_cache=f"{tmp_path}:8MiB", **settings) as engine:
        assert (engine.config.ram_eviction_policy, engine.config.disk_eviction_policy) == (ram, disk)


def test_a_folder_in_use_is_refused(folder: Path, tmp_path: Path) -> None:
    disk = f"{tmp_path}:8MiB"
    with engine_of(folder, disk_cache=disk), pytest.raises(ConfigError, match="process"):
        make_engine(folder, disk_cache=disk)
