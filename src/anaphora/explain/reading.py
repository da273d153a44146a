"""Reading the texts around the point where two prompts part. The text is kept only when it may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anaphora.explain.difference import common_length, recognise, recognise_tools
from anaphora.explain.outcome import Difference

Decode = Callable[[Sequence[int]], str]

_BEFORE, _AFTER = 48, 64
"""Tokens that are read around the point; a UUID takes some 25, a date and time some 20."""
_WIDE = 1024
"""Tokens that are read where tools seem to be listed."""
_SHOWN = 60
"""Characters that are kept before and after."""
_VAGUE = frozenset({"text", "random_id", "counter"})
"""What a tool's definition may look like from near by."""
_SURE = 8
"""So many tokens whose text is the same, and the texts are: a shorter one may only end sooner."""


def read_difference(
    tokens: Sequence[int], position: int, theirs: Callable[[int], Sequence[int]], decode: Decode, *, keep_text: bool
) -> Difference:
    """What stands at `position`, the first token that differs. `theirs(n)`: some n of the other's from there on."""
    near = theirs(_AFTER)
    mine, other = _texts(tokens, position, near, _BEFORE, decode)
    at = common_length(mine, other)
    code, my_span, their_span = recognise(mine, other, at)
    if code in _VAGUE and '"name"' in mine:
        wide = _texts(tokens, position, theirs(_WIDE), _WIDE, decode)
        code = recognise_tools(*wide, common_length(*wide)) or code
    if code == "longer":  # other tokens, and yet no other text
        code = "retokenised" if min(len(near), len(tokens) - position) > _SURE else "text"
    if not keep_text:
        return Difference(code, exact=True)
    start = min(my_span[0], their_span[0])
    return Difference(
        code,
        exact=True,
        before=mine[max(0, start - _SHOWN) : start],
        mine=mine[start : my_span[1]],
        theirs=other[start : their_span[1]],
        after=mine[my_span[1] : my_span[1] + _SHOWN],
    )


def _texts(tokens: Sequence[int], position: int, theirs: Sequence[int], before: int, decode: Decode) -> tuple[str, str]:
    """Both texts, from `before` tokens before the point, to as many tokens after it as the other has."""
    shared = list(tokens[max(0, position - before) : position])
    after = max(_AFTER, before)
    return decode([*shared, *tokens[position : position + after]]), decode([*shared, *theirs[:after]])
