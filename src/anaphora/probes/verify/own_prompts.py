"""`verify --prompts`: the user's own requests, sent twice, and for every miss the place where it came about."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anaphora.errors import ConfigError, ProbeError
from anaphora.probes.client import ProbeClient
from anaphora.probes.counters import Counters, scrape
from anaphora.probes.engines import Engine, detect
from anaphora.probes.verify.divergence import Divergence, explain

Progress = Callable[[str, int, int | None], None]
Request = Mapping[str, Any]

_PASSED_ON = ("tools", "tool_choice", "chat_template_kwargs", "cache_salt", "response_format", "reasoning_effort")
_FASTER = 1.3
_SHORT = 64
"""Prompts of fewer tokens may fill no block: a miss of theirs means nothing."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One request as it was answered."""

    ttft: float
    prompt_tokens: int | None
    reused: float | None
    """Prompt tokens reused, by `cached_tokens` or else the hit counter; None where neither tells."""


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt in both passes; `second` is None when the measurement ended before."""

    number: int
    """From 1, as in the file."""
    first: Reading
    second: Reading | None
    divergence: Divergence | None

    @property
    def hit(self) -> bool | None:
        """First pass: whether at least half of the prompt was reused; None where nobody can tell."""
        return self._half(self.first, faster=False)

    @property
    def hit_again(self) -> bool | None:
        """Second pass, when the very same prompt had been sent before."""
        return None if self.second is None else self._half(self.second, faster=True)

    def _half(self, reading: Reading, *, faster: bool) -> bool | None:
        if reading.reused is not None and reading.prompt_tokens:
            return reading.reused >= reading.prompt_tokens / 2
        if self.second is not None and self.first.ttft > _FASTER * self.second.ttft:
            return faster  # the second pass was quicker: it reused what the first had to compute
        return None

    @property
    def too_short(self) -> bool:
        return self.first.prompt_tokens is not None and self.first.prompt_tokens < _SHORT

    def as_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "first": asdict(self.first),
            "second": None if self.second is None else asdict(self.second),
            "hit": self.hit,
            "hit_again": self.hit_again,
            "divergence": None if self.divergence is None else self.divergence.as_dict(),
        }


@dataclass(slots=True)
class OwnPrompts:
    """State changes: filled in by `measure_own`."""

    requests: list[Request]
    engine: Engine = field(default_factory=Engine)
    model: str | None = None
    passes: tuple[list[Reading], list[Reading]] = field(default_factory=lambda: ([], []))
    failure: ProbeError | None = None

    def results(self) -> list[PromptResult]:
        """One for every prompt of the first pass. A prompt that hit, or the first of all, has no divergence."""
        first, second = self.passes
        found = []
        for i, reading in enumerate(first):
            again = second[i] if i < len(second) else None
            whole = PromptResult(i + 1, reading, again, explain(self.requests[i], self.requests[:i]))
            found.append(PromptResult(i + 1, reading, again, None) if whole.hit else whole)
        return found

    def needs_attention(self) -> bool:
        """A miss with a cause that can be mended, or a prompt that missed although it had been sent before."""
        return any(
            not result.too_short
            and (
                result.hit_again is False
                or (result.hit is False and result.divergence is not None and bool(result.divergence.cause.fix))
            )
            for result in self.results()
        )


def load_requests(path: Path) -> list[Request]:
    """JSONL of chat requests (objects with `messages`), or plain text with one prompt a line. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {error}; give a readable text or JSONL file") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts {path} holds no prompt; put one on each line")
    if numbered[0][1].lstrip().startswith("{"):
        return [_request(path, number, line) for number, line in numbered]
    return [{"messages": [{"role": "user", "content": line}]} for _, line in numbered]


async def measure_own(state: OwnPrompts, client: ProbeClient, progress: Progress) -> None:
    """Send every request twice, one at a time, in order. Raises ProbeError if the very first fails."""
    progress("looking at the server", 0, None)
    state.engine = await detect(client)
    state.model = await client.choose_model()
    counters = await scrape(client)
    total = 2 * len(state.requests)
    try:
        for number, readings in enumerate(state.passes):
            for i, request in enumerate(state.requests):
                progress("sending each prompt twice", number * len(state.requests) + i, total)
                reading, counters = await _send(client, state.model, request, counters)
                readings.append(reading)
    except ProbeError as error:
        if not state.passes[0]:
            raise
        state.failure = error


async def _send(
    client: ProbeClient, model: str, request: Request, before: Counters | None
) -> tuple[Reading, Counters | None]:
    extra = {key: request[key] for key in _PASSED_ON if key in request}
    result = await client.stream_chat(model, request["messages"], 1, extra)
    now = await scrape(client) if before is not None else None
    counted = now.since(before).hit_tokens if now is not None and before is not None else None
    reused = counted if result.cached_tokens is None else float(result.cached_tokens)
    return Reading(result.ttft, result.prompt_tokens, reused), now


def _request(path: Path, number: int, line: str) -> Request:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"--prompts {path}, line {number}: not JSON ({error}); one object a line") from None
    body = found.get("body", found) if isinstance(found, dict) else found  # OpenAI's batch files wrap requests
    if isinstance(body, dict) and isinstance(body.get("prompt"), str):
        return {**body, "messages": [{"role": "user", "content": body["prompt"]}]}
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ConfigError(f"--prompts {path}, line {number}: no `messages` in it; each line must be a chat request")
    return dict(body)
