"""What is asked: prompts of given lengths that no cache can know, or a trace with its shared prefixes."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from anaphora.errors import ConfigError
from anaphora.probes.verify.prompts import QUESTION_WORDS, WORDS, Scale

_STREAM = 1 << 17
"""Words in the text that prompts are cut from."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request. Token counts are what was aimed at; the answer's usage has what it was."""

    messages: Sequence[Mapping[str, Any]]
    prompt_tokens: int
    output_tokens: int


class Workload(Protocol):
    """Makes jobs; the same seed makes the same ones."""

    @property
    def description(self) -> str: ...

    def jobs(self) -> Iterator[Job]:
        """Without end, and never the same prompt again unless the workload says so."""
        ...


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts; whole numbers, at least 1."""

    text: str
    kind: str
    a: float
    b: float = 0.0

    @classmethod
    def parse(cls, text: str, option: str) -> Lengths:
        """`512`, `uniform:100-900`, `normal:512,128` (mean, deviation) or `lognormal:512,0.6` (median, sigma).

        Raises ConfigError.
        """
        number = r"(\d+(?:\.\d+)?)"
        forms = {
            "fixed": number,
            "uniform": rf"uniform:{number}-{number}",
            "normal": rf"normal:{number},{number}",
            "lognormal": rf"lognormal:{number},{number}",
        }
        for kind, form in forms.items():
            match = re.fullmatch(form, text.strip())
            if match is None:
                continue
            a, b = float(match[1]), float(match[2]) if match.lastindex == 2 else 0.0
            if a < 1 or (kind == "uniform" and b < a) or (kind == "lognormal" and b > 5):
                break
            return cls(text.strip(), kind, a, b)
        raise ConfigError(
            f"{option} {text!r} is no length; give tokens as 512, uniform:100-900, normal:512,128 (mean, deviation) "
            "or lognormal:512,0.6 (median, sigma)"
        )

    def draw(self, rng: random.Random) -> int:
        match self.kind:
            case "uniform":
                return rng.randint(math.ceil(self.a), math.floor(self.b))
            case "normal":
                value = rng.gauss(self.a, self.b)
            case "lognormal":
                value = self.a * rng.lognormvariate(0, self.b)
            case _:
                value = self.a
        return max(1, round(value))


class Texts:
    """Runs of words for keys: the same key, the same words. Cut from one long text, so that making one is cheap."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        words = random.Random(seed).choices(WORDS, k=_STREAM)
        self._stream = words + words

    def words(self, key: str, number: int) -> list[str]:
        """`number` words; the first four are the key's own, so that two keys part at once."""
        rng = random.Random(f"{self._seed}/{key}")
        found = rng.choices(WORDS, k=min(4, number))
        while len(found) < number:
            start = rng.randrange(_STREAM)
            found += self._stream[start : start + min(_STREAM, number - len(found))]
        return found


class SyntheticWorkload:
    """Lengths from distributions; every prompt differs from its first words on, or after a prefix that all share."""

    def __init__(
        self, prompt: Lengths, output: Lengths, scale: Scale, *, shared_prefix: int = 0, seed: int = 0
    ) -> None:
        self._prompt, self._output, self._scale = prompt, output, scale
        self._shared = shared_prefix
        self._seed = seed

    @property
    def description(self) -> str:
        shared = f", the first {self._shared:,} of them shared" if self._shared else ""
        return f"prompts of {self._prompt.text} tokens{shared}; outputs of {self._output.text} tokens"

    def jobs(self) -> Iterator[Job]:
        rng, texts = random.Random(self._seed), Texts(self._seed)
        prefix = texts.words("prefix", self._scale.words_for(self._shared)) if self._shared else []
        for number in count():
            tokens, output = max(self._prompt.draw(rng), self._shared + 1), self._output.draw(rng)
            total = _words(self._scale, tokens)
            words = prefix + texts.words(f"prompt {number}", max(2, total - len(prefix)))
            yield Job(_chat(words), tokens, output)


@dataclass(frozen=True, slots=True)
class TraceRow:
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


class TraceWorkload:
    """A trace's lengths and shared prefixes, in its order, its text invented: a hash id is a text.

    A hash id stands for `block_size` tokens. `factor` scales all lengths, blocks included, so that the shares of the
    prompts that are shared stay. Past its end the trace begins again with other texts.
    """

    def __init__(
        self, rows: Sequence[TraceRow], scale: Scale, *, block_size: int = 512, factor: float = 1.0, seed: int = 0
    ) -> None:
        self._rows, self._scale, self._factor, self._seed = rows, scale, factor, seed
        self._block_size = block_size

    @property
    def description(self) -> str:
        n = len(self._rows)
        prompt = sum(row.input_length for row in self._rows) * self._factor / n
        output = sum(row.output_length for row in self._rows) * self._factor / n
        shrunk = f", lengths times {self._factor:g}" if self._factor != 1 else ""
        return f"a trace of {n:,} requests{shrunk}: on average {prompt:,.0f} prompt and {output:,.0f} output tokens"

    def jobs(self) -> Iterator[Job]:
        texts = Texts(self._seed)
        block = max(1, round(self._block_size * self._factor / self._scale.per_word))
        for turn in count():
            for number, row in enumerate(self._rows):
                tokens = max(1, round(row.input_length * self._factor))
                total = _words(self._scale, tokens)
                words: list[str] = []
                for identity in row.hash_ids:
                    if len(words) < total:
                        words += texts.words(f"block {turn} {identity}", block)[: total - len(words)]
                if len(words) < total:
                    words += texts.words(f"row {turn} {number}", total - len(words))
                yield Job(_chat(words), tokens, max(1, round(row.output_length * self._factor)))


class Fitting:
    """The jobs that the server's context holds; iterable without end. `skipped` counts the others.

    Raises ConfigError when a thousand in a row do not fit.
    """

    def __init__(self, workload: Workload, context: int | None) -> None:
        self._jobs = workload.jobs()
        self._context = context
        self.skipped = 0

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        for _ in range(1000):
            job = next(self._jobs)
            if self._context is None or job.prompt_tokens + job.output_tokens <= self._context:
                return job
            self.skipped += 1
        raise ConfigError(
            f"The requests are longer than the server's context of {self._context:,} tokens; give shorter "
            "--prompt-tokens and --output-tokens, or a smaller --trace-scale"
        )


def _words(scale: Scale, tokens: int) -> int:
    """Words of a message so that the prompt, its template included, has so many tokens.

    The scale's head holds the ending of the prompts that it was measured with; ours go without.
    """
    return max(1, round((tokens - scale.head) / scale.per_word) + QUESTION_WORDS)


def _chat(words: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": " ".join(words)}]
