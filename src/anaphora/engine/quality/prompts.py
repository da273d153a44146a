"""What is read: built-in texts or the user's prompts, and questions whose answer stands far back in the context.

The built-in texts are English, Chinese and code. A prompt begins with one of them and goes on with those after it until
the context is full, so that every text is read near by and far into the context, and no prompt says a thing twice.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from anaphora.engine.tokenizer import Tokenizer
from anaphora.errors import ConfigError

_ORDER = (
    "english-letter",
    "code-python",
    "chinese-tea",
    "english-soil",
    "code-sql",
    "chinese-notice",
    "english-meeting",
    "code-go",
)
DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Where the fact stands that a question asks for, as shares of the context."""
_SHORTEST = 64
"""Tokens of context that a question needs around it."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens begin .. end - 1 of a prompt, all of one text: the unit that confidence intervals are over."""

    text: str
    kind: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """Read token by token; every next token is compared."""

    name: str
    token_ids: tuple[int, ...]
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """Read whole; the answer's tokens, the last ones, are compared."""

    depth: float
    token_ids: tuple[int, ...]
    answer_tokens: int


def built_in(tokenizer: Tokenizer, context: int) -> list[Prompt]:
    """One prompt per text, each at most `context` tokens long."""
    folder = files(__package__) / "texts"
    texts = [(name, tokenizer.encode((folder / f"{name}.txt").read_text("utf-8") + "\n")) for name in _ORDER]
    prompts = []
    for first, (name, _) in enumerate(texts):
        tokens: list[int] = []
        stretches = []
        for text, ids in (*texts[first:], *texts[:first]):
            begin, end = len(tokens), min(context, len(tokens) + len(ids))
            if begin < end:
                tokens += ids[: end - begin]
                stretches.append(Stretch(text, text.partition("-")[0], begin, end))
        prompts.append(Prompt(name, tuple(tokens), tuple(stretches)))
    return prompts


def own(requests: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, context: int) -> list[Prompt]:
    """The user's chats (`messages`), cut to `context` tokens. Raises ConfigError where one has no two tokens."""
    prompts = []
    for number, request in enumerate(requests, 1):
        name = f"prompt {number}"
        tokens = tokenizer.encode_chat(request["messages"])[:context]
        if len(tokens) < 2:
            raise ConfigError(f"{name} has fewer than two tokens, so there is nothing to predict; leave it out")
        prompts.append(Prompt(name, tuple(tokens), (Stretch(name, "own", 0, len(tokens)),)))
    return prompts


def questions(tokenizer: Tokenizer, context: int) -> list[Question]:
    """One per depth, each `context` tokens long; none where the context is too short to hold one."""
    found = []
    for number, depth in enumerate(DEPTHS):
        draw = random.Random(number)
        place, code = draw.choice(_PLACES), draw.randrange(10_000, 100_000)
        fact = _plain(tokenizer, f" The number of the locker in {place} is {code}.")
        asked = _plain(tokenizer, f"\n\nWhat was said above: the number of the locker in {place} is")
        answer = _plain(tokenizer, f" {code}")
        room = context - len(fact) - len(asked) - len(answer)
        if room < _SHORTEST:
            return []
        hay = tokenizer.encode("Notes from the road.")
        while len(hay) < room:
            hay += _plain(tokenizer, _note(draw))
        at = round(depth * room)
        tokens = (*hay[:at], *fact, *hay[at:room], *asked, *answer)
        found.append(Question(depth, tokens, len(answer)))
    return found


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


_PLACES = ("Arvika", "Bergamo", "Cuenca", "Dundee", "Esbjerg", "Flensburg")
_WHO = ("the driver", "a nurse", "my neighbour", "an old soldier", "the twins", "two surveyors", "nobody we knew")
_DID = ("waited at", "walked past", "had lunch near", "repaired the fence of", "drew a map of", "asked the way to")
_WHERE = ("the mill", "a closed station", "the ferry", "the salt store", "an orchard", "the weather mast", "the canal")
_THEN = (
    "It rained from {} until {}.",
    "The road was {} metres long and cost {} days.",
    "We counted {} geese and {} swans.",
    "Dinner was {} minutes late, and {} of us slept through it.",
    "The barometer stood at {} and fell by {} overnight.",
)


def _note(draw: random.Random) -> str:
    then = draw.choice(_THEN).format(draw.randrange(2, 990), draw.randrange(2, 90))
    day = draw.randrange(1, 365)
    return f" On day {day} {draw.choice(_WHO)} {draw.choice(_DID)} {draw.choice(_WHERE)}. {then}"
