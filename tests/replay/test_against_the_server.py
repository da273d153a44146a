"""The replay of a request log counts what the server counted that wrote it: SmolLM2, a small pool, blocks evicted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

import pytest

from anaphora.blocks.eviction import make_policy
from anaphora.engine.params import SamplingParams
from anaphora.replay.outcomes import log_outcome
from anaphora.replay.readers.base import ReadReport
from anaphora.replay.readers.source import read_trace
from anaphora.replay.request_log import RequestLogWriter
from anaphora.replay.simulator import PoolReplay, replay
from support.engines import make_engine, run_all

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
SIZE, NUM_BLOCKS = 16, 24


def conversations(count: int) -> list[list[int]]:
    """Prompts of whole blocks that go on from earlier ones, none twice: a replay knows of whole blocks, the server
    reuses parts of them too and computes a prompt's last token again. So every block begins with a token of its own."""
    random, begun = Random(3), [[1000 + i for i in range(SIZE)]]
    prompts = []
    for number in range(count):
        earlier = begun[0] if random.random() < 0.5 else random.choice(begun[-6:])
        fresh = [2000 + 3 * number + block + offset * 40 for block in range(1 + number % 3) for offset in range(SIZE)]
        prompt = [*earlier, *fresh]
        if len(prompt) <= 10 * SIZE:
            begun.append(prompt)
        prompts.append(prompt)
    return prompts


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_hits_and_evictions_are_the_server_s(smollm2: Path, tmp_path: Path, policy: str) -> None:
    engine = make_engine(smollm2, num_blocks=NUM_BLOCKS, max_model_len=256, block_size=SIZE, eviction_policy=policy)
    path = tmp_path / "requests.log"
    writer = RequestLogWriter(path, block_size=SIZE)
    engine.explainer.on_finish = partial(log_outcome, writer)
    prompts = conversations(40)
    for number, prompt in enumerate(prompts):
        engine.add(f"r{number}", prompt, ONE)
        run_all(engine)
    writer.close()
    counted = [(o.prompt_tokens, o.reused.get("pool", 0)) for o in reversed(engine.explainer.outcomes.last(1000))]
    evictions = engine.cache.evictions
    engine.close()

    cache = PoolReplay(NUM_BLOCKS, make_policy(policy))
    requests = list(read_trace(path, ReadReport()))
    assert [(r.input_length, SIZE * cache.request(r.blocks(SIZE))[0]) for r in requests] == counted
    assert cache.pool.evictions == evictions > 20
    totals = replay(requests, NUM_BLOCKS, make_policy(policy))
    assert (totals.tokens, totals.hit_tokens) == tuple(map(sum, zip(*counted, strict=True)))
    assert 0 < totals.hit_tokens < totals.tokens
