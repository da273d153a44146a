"""The native backend: the same bits however a prompt is computed, and what happens where it cannot run."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, LlamaConfig, PreTrainedConfig

from anaphora import native
from anaphora.engine.batch import Batch, BatchRow
from anaphora.engine.models.load import load_model
from anaphora.engine.runner import ModelRunner
from anaphora.errors import ConfigError
from anaphora.geometry.kv_dtype import NAMES, PLAIN
from anaphora.geometry.layout import CacheLayout
from anaphora.geometry.model import ModelGeometry
from anaphora.types import NULL_BLOCK, BlockCopy, BlockId, RequestId
from support.engines import GREEDY, generate, make_engine
from support.models import save_tiny_model, tiny_llama
from support.storage import make_storage, needs_native, runner_of

SIZES = {"vocab_size": 97, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "head_dim": 16}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048),
    "gemma2": Gemma2Config(
        **SIZES, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048, sliding_window=70
    ),
}
LENGTH = 600
"""Of the prompt: two whole partitions of the kernels' and a part."""
BLOCK, PER_ROW = 16, 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_tiny_model(tmp_path_factory.mktemp(name), config) for name, config in CONFIGS.items()}


class Model:
    """A native model over room for 33 rows; what nobody wrote is NaN."""

    def __init__(self, folder: Path, dtype: str, kv_dtype: str | None = None) -> None:
        config = json.loads((folder / "config.json").read_text())
        geometry = ModelGeometry.from_config(config)
        loaded = load_model(
            folder, config, geometry, dtype=getattr(torch, dtype), device=torch.device("cpu"), backend="native"
        )
        self.layout = CacheLayout.of(geometry, BLOCK)
        storage = make_storage(self.layout, 33 * PER_ROW * len(self.layout.groups), kv_dtype or dtype, nan=True)
        self.runner: ModelRunner = runner_of(loaded, storage)

    def row(self, tokens: Sequence[int], start: int, place: int = 0) -> BatchRow:
        """tokens[start:], in blocks of its place; what a window has passed is gone."""
        tables = []
        for index, group in enumerate(self.layout.groups):
            first = (place * len(self.layout.groups) + index) * PER_ROW
            table = list(range(first, first - (-len(tokens) // BLOCK)))
            passed = 0 if group.window is None else max(0, start - group.window + 1) // BLOCK
            tables.append([NULL_BLOCK] * passed + table[passed:])
        return BatchRow(RequestId(str(place)), tuple(tokens[start:]), start, tuple(tables), sample=True)

    def compute(self, *rows: BatchRow, copies: Sequence[BlockCopy] = ()) -> Tensor:
        return self.runner.execute(Batch(rows, tuple(copies)))


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPT = tokens_of(0, LENGTH + 1)


CASES = [
    *((name, dtype, None) for name in CONFIGS for dtype in ("float32", "bfloat16")),
    *(("gemma2", "bfloat16", kv_dtype) for kv_dtype in NAMES if kv_dtype not in PLAIN),
    ("llama", "float32", "int4"),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request: pytest.FixtureRequest, folders: dict[str, Path]) -> tuple[Model, Tensor, Tensor]:
    """(model, logits after the prompt in one go, logits after one more token)."""
    name, dtype, kv_dtype = request.param
    model = Model(folders[name], dtype, kv_dtype)
    return model, model.compute(model.row(PROMPT[:LENGTH], 0)), model.compute(model.row(PROMPT, LENGTH))


@needs_native
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunks_change_no_bit(case: tuple[Model, Tensor, Tensor], chunk: int) -> None:
    model, whole, decoded = case
    for start in range(0, LENGTH, chunk):
        logits = model.compute(model.row(PROMPT[: min(LENGTH, start + chunk)], start, place=1))
    assert torch.equal(logits, whole)
    assert torch.equal(model.compute(model.row(PROMPT, LENGTH, place=1)), decoded)


@needs_native
def test_company_changes_no_bit(case: tuple[Model, Tensor, Tensor]) -> None:
    """Prefilled and decoded among 31 others, some of which decode, some prefill, some share the prompt's blocks."""
    model, whole, decoded = case
    model.compute(model.row(PROMPT[:LENGTH], 0))
    others = [tokens_of(seed, 20 * seed) for seed in range(2, 17)]
    for place, tokens in enumerate(others, 2):
        model.compute(model.row(tokens[:-1], 0, place))
    decoding = [model.row(tokens, len(tokens) - 1, place) for place, tokens in enumerate(others, 2)]
    prefilling = [model.row(tokens_of(seed, 9 * seed), 0, seed) for seed in range(17, 25)]
    sharing = [model.row(PROMPT[: LENGTH - 100 + i], LENGTH - 101 + i, place=0) for i in range(8)]
    ours = model.row(PROMPT[:LENGTH], 0, place=1)
    logits = model.compute(*decoding, ours, *prefilling, *sharing)
    assert len(logits) == 32
    assert torch.equal(logits[len(decoding)], whole[0])
    logits = model.compute(*prefilling, model.row(PROMPT, LENGTH, place=1), *decoding)
    assert torch.equal(logits[len(prefilling)], decoded[0])


@needs_native
def test_a_warm_start_changes_no_bit(case: tuple[Model, Tensor, Tensor]) -> None:
    """The first 392 tokens come from another row's blocks, the last 8 of them by a copy of half a block."""
    model, whole, _ = case
    model.compute(model.row(PROMPT[:LENGTH], 0))
    start = 392
    shared, own = model.row(PROMPT[:LENGTH], start), model.row(PROMPT[:LENGTH], start, place=1)
    tables, copies = [], []
    for theirs, ours in zip(shared.block_tables, own.block_tables, strict=True):
        copies.append(BlockCopy(BlockId(theirs[start // BLOCK]), BlockId(ours[start // BLOCK]), start % BLOCK))
        tables.append((*theirs[: start // BLOCK], *ours[start // BLOCK :]))
    warm = replace(own, block_tables=tuple(tables))
    assert torch.equal(model.compute(warm, copies=copies), whole)


@needs_native
def test_threads_change_no_bit(case: tuple[Model, Tensor, Tensor]) -> None:
    model, whole, decoded = case
    module = native.load()
    assert module is not None
    before = module.threads()
    try:
        for threads in (1, 2, 3):
            module.set_threads(threads)
            assert torch.equal(model.compute(model.row(PROMPT[:LENGTH], 0)), whole)
            assert torch.equal(model.compute(model.row(PROMPT, LENGTH)), decoded)
    finally:
        module.set_threads(before)


@needs_native
def test_bfloat16_weights_give_the_bits_of_float32_ones(folders: dict[str, Path], tmp_path: Path) -> None:
    """Nothing but the weights is ever bfloat16 when keys and values are kept in float32."""
    from safetensors.torch import load_file, save_file

    for file in folders["llama"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: each.bfloat16() for name, each in weights.items()}, tmp_path / "model.safetensors")
    half, full = (Model(tmp_path, dtype, "float32") for dtype in ("bfloat16", "float32"))
    assert torch.equal(*(model.compute(model.row(PROMPT, 0)) for model in (half, full)))


@needs_native
def test_best_is_the_argmax_of_every_row(case: tuple[Model, Tensor, Tensor]) -> None:
    model, _, _ = case
    rows = tuple(model.row(tokens_of(seed, 30 + seed), 0, seed) for seed in range(9))
    step = model.runner.step(Batch(rows))
    assert step.best is not None
    assert step.best.tolist() == step.logits.argmax(1).tolist()


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in an installation without a compiler: the module cannot be imported."""
    monkeypatch.setitem(sys.modules, "anaphora._native", None)
    native.missing.cache_clear()
    native.load.cache_clear()
    yield
    monkeypatch.undo()
    native.missing.cache_clear()
    native.load.cache_clear()


@pytest.mark.usefixtures("no_extension")
def test_without_the_extension_the_torch_backend_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_llama(tmp_path / "tiny")
    with caplog.at_level(logging.WARNING):
        engine = make_engine(folder, num_blocks=64)
    assert engine.config.backend == "torch"
    [warning] = [record.getMessage() for record in caplog.records]
    assert "install a C++20 compiler" in warning
    asked = generate(make_engine(folder, num_blocks=64, backend="torch"), [1, 2, 3])
    assert generate(engine, [1, 2, 3]) == asked
    with pytest.raises(ConfigError, match=r"--backend native: no native kernels.*leave --backend at auto"):
        make_engine(folder, num_blocks=64, backend="native")


@needs_native
@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"block_size": 8}, "multiple of 16, and it is 8"), ({"dtype": "float16"}, "no float16 weights")],
)
def test_what_the_kernels_cannot_do_is_said(tmp_path: Path, settings: dict[str, object], reason: str) -> None:
    folder = tiny_llama(tmp_path / "tiny")
    engine = make_engine(folder, num_blocks=64, **settings)
    assert engine.config.backend == "torch"
    assert reason in engine.config.backend_reason
    with pytest.raises(ConfigError, match=reason):
        make_engine(folder, num_blocks=64, backend="native", **settings)


@needs_native
def test_native_is_what_auto_takes(tmp_path: Path) -> None:
    engine = make_engine(tiny_llama(tmp_path / "tiny"), num_blocks=64)
    assert engine.config.backend == "native"
    assert len(generate(engine, [5, 6, 7])) == GREEDY.max_tokens


def test_an_unknown_backend_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="auto, native, torch"):
        make_engine(tiny_llama(tmp_path / "tiny"), num_blocks=64, backend="cuda")
