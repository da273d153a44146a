"""The same tokens through several stored forms, chunk by chunk side by side, so that no logits are ever kept.

logits of a chunk, as the reference -> compared with those of every other form -> two numbers a token stay
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anaphora.engine.quality.sequences import Sequences
from anaphora.errors import AnaphoraError

_LOGITS_BYTES = 64 << 20
"""Most bytes of one form's logits at a time; two are there at once, and pieces of _ROWS beside them."""
_ROWS = 64

Floats = NDArray[np.float32]
Advance = Callable[[int], None]
"""Called with a number of tokens that were computed."""


def chunk_tokens(vocab_size: int, at_most: int) -> int:
    """Tokens to compute at a time."""
    return max(16, min(at_most, _LOGITS_BYTES // (4 * vocab_size)))


@dataclass(frozen=True, slots=True)
class Scores:
    """Of the tokens that were predicted, one after the other."""

    kl: Floats
    """KL(reference || this form), nats."""
    same: NDArray[np.bool_]
    """Whether both think the same token likeliest."""
    surprise: Floats
    """-ln of the probability of the token that came; its mean is ln of the perplexity."""
    right: NDArray[np.bool_]
    """Whether the token that came was the likeliest."""

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """One after the other."""
        if not parts:
            nothing, none = np.empty(0, np.float32), np.empty(0, np.bool_)
            return cls(nothing, none, nothing, none)
        return cls(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)))


@torch.inference_mode()
def read(
    forms: Sequence[Sequences], names: Sequence[str], tokens: Sequence[int], begin: int, chunk: int, advance: Advance
) -> tuple[list[Scores], list[int]]:
    """Predict tokens[begin:] (begin > 0) with every form; the first one is the reference.

    -> (scores, the likeliest token after the last), each by form. State changes: the sequences hold `tokens`.
    Raises AnaphoraError, naming the form, when logits are NaN.
    """
    parts: list[list[Scores]] = [[] for _ in forms]
    after = [0] * len(forms)
    for start in range(0, len(tokens), chunk):
        ids = tokens[start : start + chunk]
        wanted = start + len(ids) >= begin
        first = max(0, begin - 1 - start)
        following = torch.tensor(tokens[start + first + 1 : start + len(ids) + 1])
        reference: Tensor | None = None
        for number, form in enumerate(forms):
            logits = form.step([ids], start, sample=wanted, every=True).logits
            if wanted:
                seen = logits[first : first + len(following)]
                reference = seen if reference is None else reference
                parts[number].append(_compare(reference, seen, following.to(seen.device), names[number]))
                after[number] = int(logits[-1].argmax())
            advance(len(ids))
    return [Scores.joined(each) for each in parts], after


@torch.inference_mode()
def first_differences(
    forms: Sequence[Sequences], after: Sequence[int], start: int, most: int, ends: Collection[int], advance: Advance
) -> list[int | None]:
    """Go on greedily from `start` with the reference, then with every other form until it parts from it.

    `after`: the first token of each. -> the number, from 0, of the first token that differs; None when none of up to
    `most` does. State changes: the sequences.
    """
    path = [after[0]]
    while len(path) < most and path[-1] not in ends:
        path.append(int(forms[0].step([path[-1:]], start + len(path) - 1).logits[0].argmax()))
        advance(1)
    found: list[int | None] = [None]
    for form, token in zip(forms[1:], after[1:], strict=True):
        at = 0
        while token == path[at] and at + 1 < len(path):
            token = int(form.step([[token]], start + at).logits[0].argmax())
            advance(1)
            at += 1
        found.append(None if token == path[at] else at)
    return found


def _compare(reference: Tensor, logits: Tensor, following: Tensor, name: str) -> Scores:
    """reference, logits [n, vocab_size]; following [n]."""
    pieces = []
    for begin in range(0, len(following), _ROWS):
        rows = slice(begin, begin + _ROWS)
        ours = logits[rows].log_softmax(-1)
        if bool(ours.amax(-1).isnan().any()):
            raise AnaphoraError(
                f"with keys and values as {name} the model computes NaN; they are beyond what it holds. Leave it out"
            )
        theirs = ours if logits is reference else reference[rows].log_softmax(-1)
        apart = torch.where(theirs > -torch.inf, theirs.exp() * (theirs - ours), 0).sum(-1).clamp_min(0)
        best = ours.argmax(-1)
        surprise = -ours.gather(-1, following[rows, None])[:, 0]
        columns = (apart, best == theirs.argmax(-1), surprise, best == following[rows])
        pieces.append(Scores(*(column.cpu().numpy() for column in columns)))
    return Scores.joined(pieces)
