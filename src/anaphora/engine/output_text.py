"""From tokens to the text of one answer, piece by piece: never half a character, never part of a stop string.

    text of the output   . . . . . . . . . . . . . . . | . . . . . | . . .
                         handed out                    | held      | bytes of an unfinished character
                                                       a suffix that may begin a stop string

Rules
- All deltas joined are what `Tokenizer.decode` makes of the prompt and the output, after the prompt's part; so for a
  prompt without visible text (or a byte-level tokenizer) they are `decode(output)`. Missing are only the stop text, and
  an unfinished character at the very end.
- A stop string counts when it ends in the text of a token after the first `min_tokens`. The first to be completed
  wins, the longest among those completed by the same character; how the text is cut into tokens does not matter.
- A token that ends the output (eos, unless ignored, or one of stop_token_ids) has no text and is not handed out,
  unless include_stop_str_in_output is set (as in vLLM; skip_special_tokens then decides on its text).
- A token (id and log probability) is handed out together with the last of its text. One whose text lies wholly in the
  removed stop text, or after it, is never handed out, but counts in `num_output_tokens`. Tokens of an unfinished
  character at the very end are handed out without text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from anaphora.engine.params import SamplingParams, TokenLogprob
from anaphora.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one token made visible."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token id when tokens are pushed with their log probabilities, else empty."""
    finished_by: str | int | None = None
    """What ended the output: the stop string, or the stop token's or eos token's id; None while it goes on."""

    def __add__(self, later: TextDelta) -> TextDelta:
        return TextDelta(
            self.text + later.text,
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            later.finished_by if self.finished_by is None else self.finished_by,
        )


@dataclass(frozen=True, slots=True)
class _Token:
    token: TokenLogprob | int
    start: int
    """Position in the output's text, in characters, of the first character it has a part of."""
    end: int
    """Position after the last."""


class OutputText:
    """The text of one sequence. State changes: `push`, `flush`. O(1) amortised per token and stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._decoder = tokenizer.utf8_decoder()
        self._first = not any(self._visible(token_id) for token_id in reversed(prompt_ids))
        self._stops = [_StopString(stop) for stop in params.stop if stop]
        self._held = ""
        self._emitted = 0
        self._tokens: deque[_Token] = deque()
        self._finished = False
        self.num_output_tokens = 0
        """Every token pushed, the one that ended the output included."""

    def push(self, token: TokenLogprob | int) -> TextDelta:
        """Add the next token. After a delta with `finished_by` nothing more may be pushed."""
        token_id = token if isinstance(token, int) else token.token_id
        self.num_output_tokens += 1
        counts = self.num_output_tokens > self._params.min_tokens
        eos = token_id in self._tokenizer.eos_token_ids and not self._params.ignore_eos
        ends = counts and (eos or token_id in self._params.stop_token_ids)
        if not ends or self._params.include_stop_str_in_output:
            match = self._append(token, token_id, counts and not ends)
            if match is not None:
                return self._stop_at(match)
        if ends:
            return self._finish(token_id)
        return self._release(len(self._held) - self._possible_stop())

    def flush(self) -> TextDelta:
        """The output ends here for another reason: what was held back, but no unfinished character."""
        return TextDelta() if self._finished else self._finish(None)

    def _visible(self, token_id: int) -> bool:
        return self._tokenizer.is_visible(token_id, skip_special_tokens=self._params.skip_special_tokens)

    def _append(self, token: TokenLogprob | int, token_id: int, check_stops: bool) -> _Match | None:
        """Decode one token into `_held`; the stop string it completes, if any."""
        before = self._emitted + len(self._held)
        start, text = before, ""
        if self._visible(token_id):
            piece = self._tokenizer.piece(token_id, first=self._first)
            self._first = False
            if self._unfinished() and not 0x80 <= piece[0] < 0xC0:  # the character is never finished: U+FFFD
                text = self._decoder.decode(b"", final=True)
                start += len(text)
            text += self._decoder.decode(piece)
            if b"\xed\xa0" <= self._decoder.getstate()[0] < b"\xee":  # a surrogate, for which Python's decoder waits
                text += self._decoder.decode(b"", final=True)
        self._held += text
        self._tokens.append(_Token(token, start, before + len(text) + self._unfinished()))
        return self._find_stop(text, before, check_stops)

    def _unfinished(self) -> bool:
        """Whether the last character waits for more bytes."""
        return bool(self._decoder.getstate()[0])

    def _find_stop(self, text: str, start: int, check: bool) -> _Match | None:
        if not self._stops:
            return None
        for position, character in enumerate(text, start + 1):
            done = [stop.text for stop in self._stops if stop.advance(character)]
            if done and check:
                longest = max(done, key=len)
                return _Match(longest, position - len(longest), position)
        return None

    def _possible_stop(self) -> int:
        """Characters at the end that may begin a stop string; none when stop strings are part of the output."""
        if self._params.include_stop_str_in_output:
            return 0
        return max((stop.matched for stop in self._stops), default=0)

    def _stop_at(self, match: _Match) -> TextDelta:
        cut = match.end if self._params.include_stop_str_in_output else match.start
        self._held = self._held[: cut - self._emitted]
        self._tokens = deque(t for t in self._tokens if t.start < cut or t.end <= cut)
        return self._finish(match.text)

    def _finish(self, by: str | int | None) -> TextDelta:
        self._finished = True
        return self._release(len(self._held), everything=True, finished_by=by)

    def _release(
        self, num_characters: int, *, everything: bool = False, finished_by: str | int | None = None
    ) -> TextDelta:
        """Hand out the first characters of `_held` and the tokens that end with them (all tokens: `everything`)."""
        text, self._held = self._held[:num_characters], self._held[num_characters:]
        self._emitted += num_characters
        out: list[TokenLogprob | int] = []
        while self._tokens and (everything or self._tokens[0].end <= self._emitted):
            out.append(self._tokens.popleft().token)
        logprobs = tuple(token for token in out if isinstance(token, TokenLogprob))
        token_ids = tuple(token if isinstance(token, int) else token.token_id for token in out)
        return TextDelta(text, token_ids, logprobs, finished_by)


@dataclass(frozen=True, slots=True)
class _Match:
    text: str
    start: int
    end: int


class _StopString:
    """Knuth-Morris-Pratt: how many of the stop string's first characters the text ends with, character by character.

    The table grows with `matched`, so a stop string costs what the text matches of it, however long it is.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0, 0]
        """[n] = length of the longest proper prefix of text[:n] that also ends it, for n up to the longest match."""

    def advance(self, character: str) -> bool:
        """Take one more character; True when the stop string is complete. State changes: `matched`."""
        self.matched = self._longest(self.matched, character)
        if self.matched == len(self._fallback):
            self._fallback.append(self._longest(self._fallback[-1], character))
        if self.matched < len(self.text):
            return False
        self.matched = self._fallback[self.matched]
        return True

    def _longest(self, matched: int, character: str) -> int:
        """What is matched after one more character when `matched` characters were before."""
        while matched and self.text[matched] != character:
            matched = self._fallback[matched]
        return matched + (self.text[matched] == character)
