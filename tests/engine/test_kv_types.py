"""Every stored form of keys and values, end to end: the same tokens however a request is cut, shared or interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from anaphora.engine.calibration import calibration_of
from anaphora.engine.config import UserConfig
from anaphora.engine.params import SamplingParams
from anaphora.engine.quality.opening import Opened, open_model
from anaphora.engine.skip_layers import parse_layers
from anaphora.engine.sources.resolve import resolve_model
from anaphora.engine.tiering.prefill import PrefillEstimate
from anaphora.errors import ConfigError
from anaphora.geometry.kv_dtype import NAMES
from anaphora.tiers.break_even import PrefillSpeed
from support.engines import generate, make_engine, run_all, tokens_of
from support.models import tiny_llama
from support.storage import needs_native

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TEXT = b"It is a truth universally acknowledged, that a single cache in possession of good blocks must be in want. " * 2
PROMPTS = [list(TEXT[begin : begin + 70]) for begin in (0, 11, 23, 37)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), head_dim=16)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where calibrations are kept."""
    root = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("ANAPHORA_CACHE", str(root))
    return root


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, ...]]]:
    """By form: what each prompt gives alone, with no cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANAPHORA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        found = {}
        for name in NAMES:
            engine = make_engine(folder, kv_cache_dtype=name, enable_prefix_caching=False)
            found[name] = [generate(engine, prompt, PARAMS) for prompt in PROMPTS]
        return found


def opened(folder: Path, *names: str) -> Opened:
    return open_model(resolve_model(str(folder)), UserConfig(dtype="float32", device="cpu", kv_memory=64 << 20), names)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "bf16"])
def test_chunks_change_no_stored_byte_and_no_logit(folder: Path, name: str) -> None:
    model = opened(folder, name)
    subject = model.subjects[1]
    prompt = PROMPTS[0]
    whole, cut = subject.open(1, 96), subject.open(1, 96)
    expected = whole.step([prompt], 0).logits
    begin = 0
    for size in (1, 15, 16, 17, len(prompt) - 49):
        found = cut.step([prompt[begin : begin + size]], begin).logits
        begin += size
    if model.prepared.config.backend == "native":
        assert torch.equal(expected, found)
    else:  # torch's products depend on how many rows they have, in the last bits
        torch.testing.assert_close(expected, found, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_sharing_and_partial_copies_change_no_token(
    folder: Path, name: str, alone: dict[str, list[tuple[int, ...]]]
) -> None:
    engine = make_engine(folder, kv_cache_dtype=name)
    cold = generate(engine, PROMPTS[0], PARAMS)
    engine.add("warm", PROMPTS[0], PARAMS)
    engine.add("branch", PROMPTS[0][:37] + PROMPTS[1], PARAMS)
    outputs = run_all(engine)
    assert cold == tokens_of(outputs["warm"]) == alone[name][0]
    assert outputs["warm"][-1].num_cached_tokens == len(PROMPTS[0]) - 1
    assert outputs["branch"][-1].num_cached_tokens >= 37  # to the token, not to the block
    without = make_engine(folder, kv_cache_dtype=name, enable_prefix_caching=False)
    assert tokens_of(outputs["branch"]) == generate(without, PROMPTS[0][:37] + PROMPTS[1], PARAMS)


@pytest.mark.parametrize("name", NAMES)
def test_preemption_and_eviction_change_no_token(
    folder: Path, name: str, alone: dict[str, list[tuple[int, ...]]]
) -> None:
    engine = make_engine(folder, kv_cache_dtype=name, num_blocks=11, max_model_len=96, max_num_seqs=4)
    for _ in range(2):  # the second time, most of what was cached has been evicted
        for number, prompt in enumerate(PROMPTS):
            engine.add(str(number), prompt, PARAMS)
        outputs = run_all(engine)
        assert [tokens_of(outputs[str(number)]) for number in range(len(PROMPTS))] == alone[name]
    assert engine.scheduler.preemptions > 0
    assert engine.cache.evictions > 0


def test_another_form_never_matches_what_a_disk_holds(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefillEstimate, "speed", lambda self: PrefillSpeed(0.05))  # or it is not worth to load

    def cached(name: str) -> int:
        engine = make_engine(folder, kv_cache_dtype=name, disk_cache=f"{tmp_path / 'disk'}:64MiB")
        try:
            engine.add("one", PROMPTS[0], PARAMS)
            return run_all(engine)["one"][-1].num_cached_tokens
        finally:
            engine.close()

    assert cached("int8") == 0
    assert cached("fp8_e4m3") == 0
    assert cached("int8") > 0


def test_a_request_whose_keys_are_infinite_ends_alone_and_names_the_layer(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    tiny_llama(broken, head_dim=16)
    file = broken / "model.safetensors"
    weights = load_file(file)
    embedding, keys = weights["model.embed_tokens.weight"], weights["model.layers.0.self_attn.k_proj.weight"]
    embedding[:, 0], keys[:, 0] = 0, 3e38
    embedding[256] = torch.eye(embedding.shape[1])[0] * 8  # token 256 alone feels that column
    save_file(weights, file, metadata={"format": "pt"})
    engine = make_engine(broken, kv_cache_dtype="int8")
    expected = generate(engine, PROMPTS[1], PARAMS)
    engine.reset_prefix_cache()
    engine.add("good", PROMPTS[1], PARAMS)
    engine.add("bad", [*PROMPTS[0][:20], 256, 5], PARAMS)
    outputs = run_all(engine)
    assert tokens_of(outputs["good"]) == expected
    assert outputs["bad"][-1].finish_reason == "error"
    assert "layer 0 made keys that are NaN or infinite" in (outputs["bad"][-1].error or "")
    assert engine.failed_steps == 0
    assert engine.cache.num_active == 0


def test_a_calibration_is_computed_once_and_a_broken_file_is_replaced(folder: Path, own_cache: Path) -> None:
    model = opened(folder, "int8")
    geometry, device = model.prepared.geometry, model.subjects[0].device

    def again() -> str:
        return calibration_of(model.loaded, model.tokenizer, geometry, device).digest

    first = again()
    path = own_cache / "calibrations" / f"{model.loaded.weights_digest}-{model.tokenizer.digest}.bin"
    whole = path.read_bytes()
    stamp = path.stat().st_mtime_ns
    assert again() == first
    assert path.stat().st_mtime_ns == stamp
    path.write_bytes(whole[:-7])
    assert again() == first
    assert path.read_bytes() == whole


def test_the_native_decoder_is_calibrated_as_the_torch_one(folder: Path) -> None:
    """Its weights are read once more, layer by layer."""
    found = []
    for backend in ("native", "torch"):
        user = UserConfig(dtype="float32", device="cpu", kv_memory=64 << 20, backend=backend)
        model = open_model(resolve_model(str(folder)), user, ["fp16"])
        found.append(calibration_of(model.loaded, model.tokenizer, model.prepared.geometry, model.subjects[0].device))
    for native, reference in zip(found[0].layers, found[1].layers, strict=True):
        torch.testing.assert_close(native.key_rms, reference.key_rms)
        torch.testing.assert_close(native.query_rms, reference.query_rms)


def test_layers_left_out_keep_the_models_own(folder: Path) -> None:
    engine = make_engine(folder, kv_cache_dtype="int4", kv_cache_dtype_skip_layers="-1")
    assert engine.config.kv_cache_dtype == "int4, layers 1 fp32"
    whole = make_engine(folder, kv_cache_dtype="int4").config.bytes_per_token
    own = make_engine(folder, kv_cache_dtype="fp32").config.bytes_per_token
    assert engine.config.bytes_per_token == whole // 2 + own // 2
    assert generate(engine, PROMPTS[0], PARAMS)


def test_keys_and_values_may_be_set_apart(folder: Path) -> None:
    apart = make_engine(folder, k_dtype="int8", v_dtype="int4")
    assert apart.config.kv_cache_dtype == "k8v4"
    assert make_engine(folder, k_dtype="int8").config.kv_cache_dtype == "keys int8, values fp32"


@pytest.mark.parametrize(
    ("text", "layers"), [("", set()), ("0,1,-1", {0, 1, 29}), ("1-3", {1, 2, 3}), ("28--1", {28, 29})]
)
def test_layers_are_parsed(text: str, layers: set[int]) -> None:
    assert parse_layers(text, 30) == layers


@pytest.mark.parametrize(
    ("text", "says"), [("x", "is no layer"), ("30", "0 to 29"), ("-31", "0 to 29"), ("5-3", "ends before it begins")]
)
def test_wrong_layers_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_layers(text, 30)


def test_unknown_types_name_the_nearest(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--k-dtype 'int88' is not known; did you mean int8"):
        make_engine(folder, k_dtype="int88")
    with pytest.raises(ConfigError, match="multiple of 16"):
        make_engine(tiny_llama(folder.parent / "narrow"), kv_cache_dtype="int8")


@needs_native
@pytest.mark.parametrize("name", NAMES)
def test_every_form_runs_on_the_native_kernels(folder: Path, name: str) -> None:
    assert make_engine(folder, kv_cache_dtype=name).config.backend == "native"


@needs_native
@pytest.mark.parametrize("name", NAMES)
def test_native_kernels_and_torch_store_nearly_the_same(folder: Path, name: str) -> None:
    """Not to the bit: products round otherwise, and then a code or a scale may be its neighbour."""
    prompt, found = PROMPTS[0], []
    for backend in ("native", "torch"):
        user = UserConfig(dtype="float32", device="cpu", kv_memory=64 << 20, backend=backend)
        subject = open_model(resolve_model(str(folder)), user, [name, "int8"]).subjects[1]
        found.append(subject.open(1, 96).step([prompt], 0, every=True).logits.log_softmax(-1))
    native, reference = found
    assert ((native - reference) * native.exp()).sum(-1).mean() < 1e-4
