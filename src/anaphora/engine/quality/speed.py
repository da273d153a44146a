"""Seconds: a prompt until its first token, and decoding with several sequences of that length at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anaphora.engine.quality.sequences import Subject

STREAMS = 8
STEPS = 24
_WARM_STEPS = 2
_PREFILLS = 2


@dataclass(frozen=True, slots=True)
class Speed:
    ttft_seconds: float
    """The better of two."""
    decode_tokens_per_second: float
    """Of all streams together, by the median step."""
    streams: int


def streams_that_fit(subjects: Sequence[Subject], length: int, budget: int) -> int:
    """Most sequences, up to STREAMS, that every one of the subjects holds in `budget` bytes; at least 1."""
    largest = max(subject.nbytes(1, length) for subject in subjects)
    return max(1, min(STREAMS, budget // largest))


def tokens(length: int, streams: int) -> int:
    """That `measure` computes."""
    return _PREFILLS * length + streams * (_WARM_STEPS + STEPS)


def measure(subject: Subject, prompt: Sequence[int], streams: int, chunk: int, advance: Callable[[int], None]) -> Speed:
    """The streams hold the same tokens, each in blocks of its own: nothing is shared. State changes: none that stay."""
    sequences = subject.open(streams, len(prompt) + _WARM_STEPS + STEPS)
    seconds = []
    for _ in range(_PREFILLS):
        began = time.perf_counter()
        token = sequences.prefill(prompt, chunk)
        seconds.append(time.perf_counter() - began)
        advance(len(prompt))
    sequences.fork()
    steps = []
    for number in range(_WARM_STEPS + STEPS):
        began = time.perf_counter()
        sequences.step([[token]] * streams, len(prompt) + number)
        steps.append(time.perf_counter() - began)
        advance(streams)
    return Speed(min(seconds), streams / statistics.median(steps[_WARM_STEPS:]), streams)
