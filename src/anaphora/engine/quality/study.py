"""The whole study: texts, greedy continuations, questions, speed, and single layers where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from anaphora.engine.quality import speed
from anaphora.engine.quality.lockstep import Scores, chunk_tokens, first_differences, read
from anaphora.engine.quality.opening import Opened
from anaphora.engine.quality.prompts import Prompt, Question
from anaphora.engine.quality.results import Measured, Result
from anaphora.engine.quality.sequences import Sequences, Subject
from anaphora.errors import ConfigError
from anaphora.geometry.units import human_bytes

Progress = Callable[[str, int, int | None], None]
"""(stage, steps done, steps in all)."""

_LAYER_PROMPTS = 4
_LAYER_TOKENS = 512
_LAYERS_AT_ONCE = 4


@dataclass(slots=True)
class _Counter:
    """Tokens of one stage, told to the user."""

    progress: Progress
    stage: str
    total: int
    done: int = 0

    def __call__(self, tokens: int) -> None:
        self.reach(self.done + tokens)

    def reach(self, done: int) -> None:
        self.done = min(self.total, done)
        self.progress(self.stage, self.done, self.total)


class Study:
    """State changes: `result`, filled in stage by stage, so that what was measured is there when one is cut short."""

    def __init__(
        self, opened: Opened, prompts: Sequence[Prompt], questions: Sequence[Question], greedy_tokens: int
    ) -> None:
        """`greedy_tokens`: generated after every prompt, at most.

        Raises ConfigError when the forms side by side take more than the KV pool may.
        """
        config = opened.prepared.config
        self._opened = opened
        self._prompts = prompts
        self._questions = questions
        self._greedy_tokens = greedy_tokens
        self._longest = max((*(each.token_ids for each in prompts), *(each.token_ids for each in questions)), key=len)
        self._room = len(self._longest) + greedy_tokens
        self._chunk = chunk_tokens(opened.prepared.geometry.vocab_size, config.max_num_batched_tokens)
        self._budget = config.kv_bytes
        needed = sum(subject.nbytes(1, self._room) for subject in opened.subjects)
        if needed > self._budget:
            raise ConfigError(
                f"{len(opened.subjects)} forms of {self._room:,} tokens take {human_bytes(needed)} side by side, and "
                f"the KV pool may have {human_bytes(self._budget)}. Lower --context, name fewer --kv-dtypes, or give "
                "a larger --kv-memory"
            )
        texts = {stretch.text: stretch.kind for prompt in prompts for stretch in prompt.stretches}
        numbers = {name: number for number, name in enumerate(texts)}
        text: list[int] = []
        position: list[int] = []
        for prompt in prompts:
            for stretch in prompt.stretches:
                text += [numbers[stretch.text]] * (stretch.end - stretch.begin)
            text.pop()  # nothing follows a prompt's last token
            position += range(len(prompt.token_ids) - 1)
        self.result = Result(
            model=config.model_name,
            backend=config.backend,
            dtype=config.dtype,
            context=len(self._longest),
            prompts=[prompt.name for prompt in prompts],
            greedy_tokens=greedy_tokens,
            depths=[question.depth for question in questions],
            texts=list(texts.items()),
            text=np.array(text, np.int32),
            position=np.array(position, np.int32),
            forms=[],
        )

    def run(self, progress: Progress, layers_of: Subject | None = None) -> Result:
        """`layers_of`: the form whose layers are left out one at a time. Raises what the model's steps raise."""
        subjects = self._opened.subjects
        forms = [subject.open(1, self._room) for subject in subjects]
        self._read_texts(forms, progress)
        self._ask(forms, progress)
        del forms
        self._time(progress)
        if layers_of is not None:
            self._skip_layers(layers_of, progress)
        return self.result

    def _read_texts(self, forms: Sequence[Sequences], progress: Progress) -> None:
        subjects = self._opened.subjects
        total = len(forms) * sum(len(prompt.token_ids) + self._greedy_tokens for prompt in self._prompts)
        count = _Counter(progress, "reading texts", total)
        parts: list[list[Scores]] = [[] for _ in forms]
        differences: list[list[int | None]] = [[] for _ in forms]
        for number, prompt in enumerate(self._prompts, 1):
            scores, after = read(forms, self._names, prompt.token_ids, 1, self._chunk, count)
            with torch.inference_mode():
                found = first_differences(forms, after, len(prompt.token_ids), self._greedy(prompt), self._ends, count)
            for i in range(len(forms)):
                parts[i].append(scores[i])
                differences[i].append(found[i])
            count.reach(len(forms) * sum(len(p.token_ids) + self._greedy_tokens for p in self._prompts[:number]))
        for subject, own, different in zip(subjects, parts, differences, strict=True):
            key, value = subject.codec.dtype.key.name, subject.codec.dtype.value.name
            self.result.forms.append(
                Measured(subject.name, key, value, subject.codec.bytes_per_token, Scores.joined(own), different)
            )

    def _ask(self, forms: Sequence[Sequences], progress: Progress) -> None:
        total = len(forms) * sum(len(question.token_ids) for question in self._questions)
        count = _Counter(progress, "asking questions", total)
        for question in self._questions:
            begin = len(question.token_ids) - question.answer_tokens
            scores, _ = read(forms, self._names, question.token_ids, begin, self._chunk, count)
            for form, score in zip(self.result.forms, scores, strict=True):
                form.answered.append(bool(score.right.all()))
                form.surprises.append(float(score.surprise.sum()))

    def _time(self, progress: Progress) -> None:
        subjects = self._opened.subjects
        streams = speed.streams_that_fit(subjects, self._room, self._budget)
        count = _Counter(progress, "measuring speed", len(subjects) * speed.tokens(len(self._longest), streams))
        batched = self._opened.prepared.config.max_num_batched_tokens
        for form, subject in zip(self.result.forms, subjects, strict=True):
            form.speed = speed.measure(subject, self._longest, streams, batched, count)

    def _skip_layers(self, subject: Subject, progress: Progress) -> None:
        reference, layout = self._opened.subjects[0], subject.codec.layout
        layers = sorted(layer for group in layout.groups for layer in group.layers)
        variants = [subject, *(self._opened.without_layer(subject, layer) for layer in layers)]
        texts = [prompt.token_ids[:_LAYER_TOKENS] for prompt in self._prompts[:_LAYER_PROMPTS]]
        groups = [variants[at : at + _LAYERS_AT_ONCE] for at in range(0, len(variants), _LAYERS_AT_ONCE)]
        total = sum(map(len, texts)) * (len(variants) + len(groups))
        count = _Counter(progress, f"{subject.name}, layer by layer", total)
        found: list[float] = []
        for group in groups:
            forms = [each.open(1, max(map(len, texts))) for each in (reference, *group)]
            names = [reference.name, *(each.name for each in group)]
            scores = [read(forms, names, tokens, 1, self._chunk, count)[0] for tokens in texts]
            found += [
                float(Scores.joined([each[number] for each in scores]).kl.mean()) for number in range(1, len(forms))
            ]
        self.result.skipped_baseline[subject.name], *by_layer = found
        self.result.skipped[subject.name] = by_layer

    @property
    def _names(self) -> list[str]:
        return [subject.name for subject in self._opened.subjects]

    @property
    def _ends(self) -> frozenset[int]:
        return frozenset(self._opened.tokenizer.eos_token_ids)

    def _greedy(self, prompt: Prompt) -> int:
        """Tokens that may follow a prompt before the model's context ends."""
        limit = self._opened.prepared.geometry.max_position
        return min(self._greedy_tokens, max(1, (limit or self._room) - len(prompt.token_ids)))
