"""What a study found, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from anaphora.engine.quality.lockstep import Floats, Scores
from anaphora.engine.quality.speed import Speed


@dataclass(slots=True)
class Measured:
    """One stored form. `scores` are of every token of every prompt, in the order of `Result.text`."""

    name: str
    key: str
    """The format of keys; `value` likewise."""
    value: str
    bytes_per_token: int
    scores: Scores
    first_difference: list[int | None] = field(default_factory=list)
    """By prompt: the number of the first greedy token that differs from the reference's; None: all were the same."""
    answered: list[bool] = field(default_factory=list)
    """By question: whether greedy generation would give the answer."""
    surprises: list[float] = field(default_factory=list)
    """By question: -ln of the probability of the answer."""
    speed: Speed | None = None


@dataclass(slots=True)
class Result:
    """A whole study; `forms[0]` is the reference."""

    model: str
    backend: str
    dtype: str
    context: int
    prompts: list[str]
    """Names."""
    greedy_tokens: int
    depths: list[float]
    """Of the questions."""
    texts: list[tuple[str, str]]
    """(name, kind): the units of confidence intervals."""
    text: NDArray[np.int32]
    """Of every token that was predicted: its text's number."""
    position: NDArray[np.int32]
    forms: list[Measured]
    skipped: dict[str, list[float]] = field(default_factory=dict)
    """Mean KL of a form (nats a token) with each layer in turn left in bf16."""
    skipped_baseline: dict[str, float] = field(default_factory=dict)
    """Likewise with none left, over the same tokens."""

    @property
    def reference(self) -> Measured:
        return self.forms[0]

    def by_text(self, values: Floats | NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """(sums, counts), by text."""
        sums = np.zeros(len(self.texts))
        np.add.at(sums, self.text, values)
        return sums, np.bincount(self.text, minlength=len(self.texts)).astype(np.int64)
