"""Prompts that nobody can have cached: random words from a seed, in lengths that are counted in tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

from anaphora.errors import ProbeError
from anaphora.probes.client import ProbeClient

_WORDS = """
able acid age air apple arm art baby back ball band bank base bath bear bed bell bird blood blue boat body bone book
box boy brain bread bridge brown bus cake call camp card care case cat chain chair cheese chief child city class
clean clock cloth cloud coal coat cold cook copper corn cotton country cow crime cup dance dark day deep desk dog
door dress drink drop dry dust ear earth east edge egg end engine eye face fact fall farm father field fire fish
flag floor flower fly food foot force forest form free friend fruit game garden gas girl glass gold grain grass
green group guard hair hand head heart heat hill home horse hour house ice iron island judge key king knee knife
lake land leaf leg letter light line lion list love machine map mark market meat metal milk mind moon morning mother
mountain mouth music name neck needle net night noise north nose nut office oil orange oven page paint paper park
part path peace pen pig pipe place plane plant plate play point pot power price rail rain red rice ring river road
rock roof room root rose salt sand school sea seat seed sheep ship shirt shoe side silk silver sister sky sleep
smoke snow soap song sound soup south space spoon spring square star steam steel stone store story street sugar
summer sun table tail tea test tooth town train tree truck unit voice wall war water wave west wheel white wind
window wine winter wood wool word work world yard year zero
"""
WORDS = tuple(_WORDS.split())
"""Short everyday words: most vocabularies have each as one token."""

QUESTION_WORDS = 6


class PromptMaker:
    """Texts from a seed; the same seed makes the same texts in the same order."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def words(self, count: int) -> list[str]:
        """Fresh words; the first begins with a capital."""
        chosen = self._rng.choices(WORDS, k=count)
        return [chosen[0].capitalize(), *chosen[1:]] if chosen else []

    def question(self) -> str:
        """A short ending that differs each time from its first word on."""
        return "? " + " ".join(self._rng.choices(WORDS, k=QUESTION_WORDS))


def prompt(prefix: list[str], ending: str) -> str:
    """A user message: the words, then the ending."""
    return " ".join(prefix) + ending


def altered(prefix: list[str]) -> list[str]:
    """The same words with one character changed: the very first."""
    first = prefix[0]
    return [("Z" if first[0] != "Z" else "Y") + first[1:], *prefix[1:]]


@dataclass(frozen=True, slots=True)
class Scale:
    """How words turn into tokens here: tokens(n words) = head + per_word * n."""

    per_word: float
    head: float
    """The chat template's own tokens and the ending, together."""
    source: str
    """usage, tokenize, or assumed."""

    def words_for(self, tokens: int) -> int:
        """Words that make at least so many tokens."""
        return max(2, -(-tokens * 1000 // round(self.per_word * 1000)))

    def tokens_for(self, words: int) -> float:
        return self.per_word * words


async def measure_scale(client: ProbeClient, model: str, maker: PromptMaker) -> Scale:
    """Two short chats of known word counts; these warm the server up too. Raises ProbeError if they fail."""
    counts: list[tuple[int, int | None]] = []
    for number in (24, 152):
        text = prompt(maker.words(number), maker.question())
        result = await client.stream_chat(model, [{"role": "user", "content": text}], 1)
        counts.append((number, result.prompt_tokens))
    (few, small), (many, large) = counts
    if small is not None and large is not None and large > small:
        per_word = (large - small) / (many - few)
        return Scale(per_word, large - per_word * many, "usage")
    counted = await count_tokens(client, model, " ".join(maker.words(many)))
    if counted:
        return Scale(counted / many, 0.0, "tokenize")
    return Scale(1.3, 0.0, "assumed")


async def count_tokens(client: ProbeClient, model: str, text: str) -> int | None:
    """Tokens of a text by the server's /tokenize, in vLLM's form or llama-server's; None where there is none."""
    for field in ("prompt", "content"):
        try:
            answer = await client.json("POST", "/tokenize", {"model": model, field: text})
        except ProbeError:
            continue
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        count = answer.get("count") if isinstance(answer, dict) else None
        if count is None and isinstance(tokens, list):
            count = len(tokens)
        if isinstance(count, int) and count > 0:
            return count
    return None
