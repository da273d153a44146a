from __future__ import annotations

import torch
from torch import Tensor

from anaphora.engine.batch import Batch, BatchRow
from anaphora.engine.models.compact import CompactDecoder
from anaphora.engine.models.rope import RopeSpec
from anaphora.engine.models.spec import DecoderSpec
from anaphora.engine.models.weights import DecoderWeights, LayerWeights, Linear
from anaphora.engine.runner import ModelRunner
from anaphora.geometry.layout import CacheGroup, CacheLayout
from anaphora.storage.paged import PagedStorage
from anaphora.types import BlockCopy, BlockId, RequestId
from support.storage import make_storage, torch_runner

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, SIZE = 61, 16, 24, 4, 2, 8, 4
LAYOUT = CacheLayout((CacheGroup(None, (1,)), CacheGroup(6, (0,))), 1, KV_HEADS, HEAD_DIM, HEAD_DIM, SIZE)
PROMPT_A = [5, 9, 44, 2, 2, 60, 31, 7, 18, 3, 25, 12, 0]
PROMPT_B = [8, 8, 1, 59, 30, 22, 6]


def decoder() -> CompactDecoder:
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    def layer() -> LayerWeights:
        return LayerWeights(
            qkv=Linear(random((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), None),
            output=Linear(random(HIDDEN, HEADS * HEAD_DIM), None),
            gate_up=Linear(random(2 * INNER, HIDDEN), None),
            down=Linear(random(HIDDEN, INNER), None),
            attention_in=random(HIDDEN),
            attention_out=None,
            mlp_in=random(HIDDEN),
            mlp_out=None,
            qk_norm=None,
        )

    spec = DecoderSpec(
        architecture="Test",
        num_layers=2,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        vocab_size=VOCAB,
        query_heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        ropes=(RopeSpec((1.0, 0.5, 0.1, 0.01), 1.0), None),
        attention_scale=0.7,
    )
    embedding = random(VOCAB, HIDDEN) * 4
    return CompactDecoder(spec, DecoderWeights(embedding, (layer(), layer()), random(HIDDEN), embedding))


def runner() -> tuple[ModelRunner, PagedStorage]:
    storage = make_storage(LAYOUT, 32, nan=True)
    return torch_runner(decoder(), storage), storage


def row(tokens: list[int], start: int, first: int, *, sample: bool = True) -> BatchRow:
    blocks = -(-(start + len(tokens)) // SIZE)
    tables = (tuple(range(first, first + blocks)), tuple(range(first + 8, first + 8 + blocks)))
    return BatchRow(RequestId(str(first)), tuple(tokens), start, tables, sample)


def test_mixed_rows_equal_each_alone() -> None:
    """B is decoded while A is prefilled in chunks; every logit is the one each makes alone in one go."""
    alone, _ = runner()
    wanted_a = alone.execute(Batch((row(PROMPT_A, 0, 0),)))
    wanted_b = [alone.execute(Batch((row(PROMPT_B[:n], 0, 16),))) for n in range(5, 8)]

    together, _ = runner()
    together.execute(Batch((row(PROMPT_B[:4], 0, 16),)))
    steps = [(PROMPT_A[:5], 0), (PROMPT_A[5:12], 5), (PROMPT_A[12:], 12)]
    for index, (chunk, start) in enumerate(steps):
        last = start + len(chunk) == len(PROMPT_A)
        rows = (row(chunk, start, 0, sample=last), row(PROMPT_B[4 + index : 5 + index], 4 + index, 16))
        logits = together.execute(Batch(rows))
        torch.testing.assert_close(logits[-1:], wanted_b[index])
        assert len(logits) == 1 + last
        if last:
            torch.testing.assert_close(logits[:1], wanted_a)


def test_copied_prefix_equals_computed_one() -> None:
    """The first 6 tokens come by copy, the second block's only half; the rest is computed on top."""
    model, storage = runner()
    wanted = model.execute(Batch((row(PROMPT_A, 0, 0),)))
    copies = tuple(
        BlockCopy(BlockId(first + block), BlockId(first + 16 + block), count)
        for first in (0, 8)
        for block, count in ((0, 4), (1, 2))
    )
    storage.data[16:] = 0xFF
    logits = model.execute(Batch((row(PROMPT_A[6:], 6, 16),), copies))
    torch.testing.assert_close(logits, wanted)
    keys, _ = storage.read(1, torch.tensor([17]))
    assert bool(keys.isfinite().all())


def test_copies_come_before_the_rows() -> None:
    """A row of the same batch overwrites the source of a copy; the copy still has the old contents."""
    model, storage = runner()
    model.execute(Batch((row(PROMPT_A[:4], 0, 0),)))
    old = storage.data[0].clone()
    model.execute(Batch((row(PROMPT_B[:4], 0, 0),), (BlockCopy(BlockId(0), BlockId(20), 4),)))
    assert torch.equal(storage.data[20], old)
    assert not torch.equal(storage.data[0], old)


def test_no_row_wants_logits() -> None:
    model, _ = runner()
    logits = model.execute(Batch((row(PROMPT_A, 0, 0, sample=False),)))
    assert logits.shape == (0, VOCAB)
    assert logits.dtype == torch.float32
