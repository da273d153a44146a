"""From logits to the next token of each row: a pure function, no state, no hidden random stream.

Order of operations (that of vLLM): logit_bias, min_tokens, repetition, presence and frequency penalties,
then temperature, min_p, top_k, top_p. Everything is defined over token ids in ascending order:

- top_k keeps every token at least as likely as the k-th one, so ties at the border all stay;
- top_p keeps the shortest run, most likely first and lowest id first among equals, that reaches top_p of
  what min_p and top_k left;
- the draw inverts the cumulative distribution of what is left, in ascending order of token id.

Rows are worked on one at a time with single-threaded numpy, so a row's token cannot depend on what else is
in the batch, and no row costs a sort of the vocabulary (partitions are O(V)).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from anaphora.engine.params import SamplingParams, TokenLogprob

_GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy, as in vLLM: logits divided by them would overflow."""

_FIRST_NUCLEUS = 256
"""How many tokens top_p looks at first; it grows until they hold enough probability."""

_BLOCK = 256
"""Weights summed at a time when a draw is looked up."""

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What the sampler knows of one sequence; token i of the output is drawn with (seed, i) alone."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    seed: int
    """The resolved seed: any integer."""
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """This row has no next token; the engine ends the request with finish_reason "error" and this reason."""

    reason: str


Sample: TypeAlias = TokenLogprob | int | SampleFailure
"""A bare token id when `logprobs` is None: then no log probability is computed."""


def sample(logits: torch.Tensor, rows: Sequence[SampleRow], best: NDArray[np.int64] | None = None) -> list[Sample]:
    """The next token of each row. `best` [N]: the lowest id of each row's largest logit, where that is known already.

    `logits` is float32 [N, V], on any device, row i for rows[i]; it is not changed. -inf means "never". A row with
    NaN or +inf, or with nothing left to choose from, gives a SampleFailure; the other rows are not affected.
    """
    best, finite = _argmax(logits, best)
    return [
        _sample_row(logits[i], int(best[i]), row) if finite[i] else SampleFailure(_NOT_FINITE)
        for i, row in enumerate(rows)
    ]


_NOT_FINITE = (
    "the model's logits are not finite numbers (NaN or infinity), so no next token exists. "
    "Try --dtype float32; if it stays, the weights are damaged: download the model again."
)
_NOTHING_LEFT = "logit_bias, min_tokens or stop_token_ids rule out every token: loosen them."


def _argmax(logits: torch.Tensor, known: NDArray[np.int64] | None) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The lowest id of each row's largest logit [N], and whether that logit is finite [N] (NaN counts as largest)."""
    if logits.device.type == "cpu":
        host = logits.numpy()
        ids = host.argmax(axis=1) if known is None else known
        return ids, np.isfinite(host[np.arange(len(ids)), ids])
    best = logits.argmax(dim=1)
    return best.cpu().numpy(), logits.gather(1, best[:, None])[:, 0].isfinite().cpu().numpy()


def _sample_row(logits: torch.Tensor, best: int, row: SampleRow) -> Sample:
    params = row.params
    greedy = params.temperature < _GREEDY_BELOW
    adjusts = _adjusts(row)
    if greedy and not adjusts and params.logprobs is None:
        return best
    raw: Floats = logits.cpu().numpy()
    token = best
    if adjusts or not greedy:
        x = _adjusted(raw, row) if adjusts else raw
        token = int(x.argmax())
        if not np.isfinite(x[token]):
            return SampleFailure(_NOTHING_LEFT)
        if not greedy:
            token = _draw(x, x[token], params, uniform(row.seed, len(row.output_ids)))
    return token if params.logprobs is None else _with_logprobs(raw, raw[best], token, params.logprobs)


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1), a multiple of 2**-53, for output token `index` of a sequence with this seed."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _adjusts(row: SampleRow) -> bool:
    p = row.params
    return bool(
        p.logit_bias
        or len(row.output_ids) < p.min_tokens
        or p.repetition_penalty != 1.0
        or p.presence_penalty
        or p.frequency_penalty
    )


def _adjusted(raw: Floats, row: SampleRow) -> Floats:
    """A copy of `raw` [V] after logit_bias, min_tokens and the penalties.

    Repetition penalty: Keskar et al., CTRL, arXiv 1909.05858; presence and frequency: the OpenAI API reference.
    """
    p, x, vocab = row.params, raw.copy(), len(raw)
    if p.logit_bias:
        x[list(p.logit_bias)] += np.fromiter(p.logit_bias.values(), np.float32)
    if len(row.output_ids) < p.min_tokens:
        x[[i for i in row.eos_token_ids.union(p.stop_token_ids) if i < vocab]] = -np.inf
    if p.repetition_penalty != 1.0:
        seen = np.zeros(vocab, np.bool_)
        for ids in (row.prompt_ids, row.output_ids):
            seen[np.fromiter(ids, np.intp, len(ids))] = True
        penalised = x[seen]
        factor = np.float32(p.repetition_penalty)
        x[seen] = np.where(penalised > 0, penalised / factor, penalised * factor)
    if (p.presence_penalty or p.frequency_penalty) and row.output_ids:
        made, counts = np.unique(np.fromiter(row.output_ids, np.intp, len(row.output_ids)), return_counts=True)
        x[made] -= np.float32(p.presence_penalty)
        x[made] -= (p.frequency_penalty * counts).astype(np.float32)
    return x


def _draw(x: Floats, largest: np.float32, params: SamplingParams, u: float) -> int:
    """A token of `x` [V] at temperature > 0: the inverse of the cumulative distribution at u in [0, 1)."""
    with np.errstate(over="ignore"):  # a logit far below the largest becomes -inf: probability 0
        z: Floats = (x - largest) / np.float32(params.temperature)
    ids: Ints | None = None
    if params.min_p > 0:
        ids = np.flatnonzero(z >= math.log(params.min_p))
        z = z[ids]
    if 0 < params.top_k < len(z):
        keep = _at_least_kth(z, params.top_k)
        ids, z = keep if ids is None else ids[keep], z[keep]
    weights: Floats = np.exp(z)
    if params.top_p < 1:
        keep = _nucleus(z, weights, params.top_p)
        ids, weights = keep if ids is None else ids[keep], weights[keep]
    at = _invert(weights, u)
    return at if ids is None else int(ids[at])


def _invert(weights: Floats, u: float) -> int:
    """The first index up to which the weights sum to more than the share u in [0, 1) of their total.

    Sums of blocks first, then within one block: a running sum over the whole vocabulary costs ten times as much.
    """
    starts = np.arange(0, len(weights), _BLOCK)
    blocks = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    goal = u * float(blocks[-1])
    block = _first_above(blocks, goal)
    below = float(blocks[block - 1]) if block else 0.0
    within = below + np.cumsum(weights[starts[block] : starts[block] + _BLOCK], dtype=np.float64)
    return int(starts[block]) + _first_above(within, goal)


def _first_above(cumulative: NDArray[np.float64], goal: float) -> int:
    """First index above `goal`; the last that adds anything when rounding lifted the goal to the total."""
    return int(min(np.searchsorted(cumulative, goal, "right"), np.searchsorted(cumulative, cumulative[-1], "left")))


def _at_least_kth(values: Floats, k: int) -> Ints:
    """Ascending indices of the values not below the k-th largest, 1 <= k <= len: k of them, or more with ties."""
    border = len(values) - k
    return np.flatnonzero(values >= np.partition(values, border)[border])


def _descending(values: Floats, candidates: Ints) -> Ints:
    """`candidates` (ascending) by falling value, lowest index first among equals."""
    return candidates[np.argsort(-values[candidates], kind="stable")]


def _nucleus(z: Floats, weights: Floats, top_p: float) -> Ints:
    """Ascending indices of the shortest run by falling z whose weights reach top_p of their sum; one at least."""
    goal = top_p * float(weights.sum(dtype=np.float64))
    k = min(_FIRST_NUCLEUS, len(z))
    while True:
        order = _descending(z, _at_least_kth(z, k))
        cumulative = np.cumsum(weights[order], dtype=np.float64)
        if cumulative[-1] >= goal or k == len(z):
            break
        k = min(16 * k, len(z))
    return np.sort(order[: int(np.searchsorted(cumulative, goal)) + 1])


def _with_logprobs(raw: Floats, largest: np.float32, token: int, k: int) -> TokenLogprob:
    """`token` with its log probability under the raw logits [V], and the k most likely tokens with theirs."""
    shifted = raw - largest
    log_sum = np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
    k = min(k, len(raw))
    top = _descending(raw, _at_least_kth(raw, k))[:k].tolist() if k else []
    return TokenLogprob(
        token_id=token,
        logprob=float(shifted[token] - log_sum),
        top=tuple((i, float(shifted[i] - log_sum)) for i in top),
    )
