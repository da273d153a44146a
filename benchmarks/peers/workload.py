"""What every engine is asked to do. Standard library only: this file runs in each peer's own environment."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["decode", "prefill", "ttft", "http-ttft", "start"]
UNITS: dict[Kind, str] = {
    "decode": "tokens/s",
    "prefill": "tokens/s",
    "ttft": "s",
    "http-ttft": "s",
    "start": "s",
}


@dataclass(frozen=True, slots=True)
class Workload:
    """`streams` prompts of `shared` common and `own` further tokens; each stream makes `new` tokens."""

    name: str
    title: str
    kind: Kind
    streams: int = 1
    shared: int = 0
    own: int = 0
    new: int = 1
    large: bool = False
    """On the larger geometry with random weights."""
    goal: str = ""

    @property
    def unit(self) -> str:
        return UNITS[self.kind]

    @property
    def more_is_better(self) -> bool:
        return self.unit == "tokens/s"

    @property
    def in_process(self) -> bool:
        return self.kind in ("decode", "prefill", "ttft")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_FIRST = ">= 1.5x the best peer"
_NEAR_LIMIT = ">= 0.88 of the limit; ahead of llama.cpp"
_PREFILL = ">= 0.80 of the limit; ahead of every peer"

_ALL = (
    Workload("decode-1", "decode, 1 stream, context 128", "decode", own=128, new=32, goal=_NEAR_LIMIT),
    Workload("decode-8", "decode, 8 streams, context 128", "decode", 8, own=128, new=24, goal=_FIRST),
    Workload("decode-32", "decode, 32 streams, context 128", "decode", 32, own=128, new=16, goal=_FIRST),
    Workload("decode-8-1024", "decode, 8 streams, context 1024", "decode", 8, own=1024, new=16, goal=">= 1.7x"),
    Workload("shared-4096", "decode, 32 streams sharing 4096 + 64 own", "decode", 32, 4096, 64, 16, goal=">= 2.5x"),
    Workload("shared-7168", "decode, 64 streams sharing 7168 + 16 own", "decode", 64, 7168, 16, 12, goal=">= 3.5x"),
    Workload("prefill-2048", "prefill, 2048 tokens", "prefill", own=2048, goal=_PREFILL),
    Workload("prefill-4096", "prefill, 4096 tokens", "prefill", own=4096, goal=_PREFILL),
    Workload("ttft-64", "warm TTFT in-process, 4096 shared + 64 new", "ttft", shared=4096, own=64),
    Workload("ttft-8", "warm TTFT in-process, 4096 shared + 8 new", "ttft", shared=4096, own=8),
    Workload("http-ttft-64", "warm TTFT over HTTP, 4096 shared + 64 new", "http-ttft", 1, 4096, 64, goal="<= 0.12 s"),
    Workload("http-ttft-8", "warm TTFT over HTTP, 4096 shared + 8 new", "http-ttft", 1, 4096, 8, goal="<= 0.04 s"),
    Workload("start", "process start to first token", "start", goal="<= 6 s"),
    Workload(
        "large-decode-1",
        "Qwen2.5-1.5B geometry, decode, 1 stream",
        "decode",
        own=128,
        new=16,
        large=True,
        goal=_NEAR_LIMIT,
    ),
)
WORKLOADS = {workload.name: workload for workload in _ALL}


def token_ids(seed: str, length: int, alphabet: Sequence[int]) -> list[int]:
    """`length` ids drawn from `alphabet`; a longer list of the same seed begins with the shorter one."""
    rng = random.Random(seed)
    return [rng.choice(alphabet) for _ in range(length)]


def plain_ids(vocabulary: int) -> range:
    """Ids that are no special tokens in any tokenizer at hand: those lie at the ends."""
    return range(300, vocabulary - 300)


def prompts(workload: Workload, turn: int, alphabet: Sequence[int]) -> list[list[int]]:
    """The token ids of every stream.

    Decode asks for the same prompts each turn, so that engines with a prefix cache compute them once; prefill and
    TTFT bring an end (prefill: a whole) that was never seen, another one each turn. Prompts of different workloads
    begin alike where they can, which saves filling the caches again. Prefill's turn 0, not counted, is a short one.
    """
    shared = token_ids("shared", workload.shared, alphabet)
    mark = "own" if workload.kind == "decode" else f"{workload.name} {turn}"
    own = min(workload.own, 256) if workload.kind == "prefill" and turn == 0 else workload.own
    return [shared + token_ids(f"{mark} {i}", own, alphabet) for i in range(workload.streams)]
