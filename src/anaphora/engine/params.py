"""What a caller asks of one sequence, and what the engine gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from anaphora.engine.outcome import TokenSources

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Values are validated by the server or the CLI.

    The order of operations is that of vLLM: logit_bias, min_tokens, repetition, presence and frequency
    penalties, then temperature, min_p, top_k, top_p. Log probabilities are of the raw logits.
    """

    max_tokens: int | None = None
    """Most new tokens; None = up to the context."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are masked until this many were made."""
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output (CTRL, arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Over the output only, as in the OpenAI API."""
    frequency_penalty: float = 0.0
    seed: int | None = None
    """None = drawn at random by the engine when the request is added."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """None = off; k = the chosen token and the k most likely."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One produced token and, when asked for, how likely it was (natural logarithm)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to one request. Deltas, never the whole text."""

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per entry of `token_ids` when asked for. Held back with the text they belong to."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it."""
    error: str | None = None
    """Says what happened when finish_reason is "error"."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was reused."""
    num_output_tokens: int = 0
    """All tokens produced so far, the end-of-sequence token included."""
    sources: TokenSources | None = None
    """With the finish_reason: where the prompt's keys and values came from."""
