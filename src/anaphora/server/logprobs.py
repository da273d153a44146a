"""Log probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from anaphora.engine.params import RequestOutput, TokenLogprob
from anaphora.engine.tokenizer import Tokenizer
from anaphora.server.responses import ChatLogprobs, CompletionLogprobs, TokenLogprobItem, TopLogprob

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> ChatLogprobs:
    """One item per produced token, each with its most likely rivals."""
    items = []
    for entry in entries:
        chosen = _top(tokenizer, entry.token_id, entry.logprob)
        rivals = [_top(tokenizer, token_id, logprob) for token_id, logprob in entry.top]
        items.append(TokenLogprobItem(**chosen.model_dump(), top_logprobs=rivals))
    return ChatLogprobs(content=items)


def completion_logprobs(tokenizer: Tokenizer, outputs: Sequence[RequestOutput], offset: int) -> CompletionLogprobs:
    """Parallel lists with one entry per produced token. `offset` = characters before the first of `outputs`.

    The chosen token is always among the top ones. A token's offset is exact at the start of each output, which
    holds whole characters, and counted in characters from there.
    """
    shaped = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for output in outputs:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        within = 0
        for entry in output.logprobs:
            rivals = {_spell(tokenizer, token_id): max(value, _LEAST) for token_id, value in entry.top}
            shaped.tokens.append(_spell(tokenizer, entry.token_id))
            shaped.token_logprobs.append(max(entry.logprob, _LEAST))
            shaped.top_logprobs.append({**rivals, shaped.tokens[-1]: shaped.token_logprobs[-1]})
            shaped.text_offset.append(offset + within)
            within = min(within + len(decoder.decode(tokenizer.token_bytes(entry.token_id))), len(output.text))
        offset += len(output.text)
    return shaped


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    spelled = _spell(tokenizer, token_id)
    return TopLogprob(token=spelled, logprob=max(logprob, _LEAST), bytes=list(tokenizer.token_bytes(token_id)))


def _spell(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; for a part of a character its bytes, written as OpenAI does: bytes:\\xe2\\x80."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
