"""How long a prompt may really be: refused with a limit named, or silently cut at its head?"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import httpx

from anaphora.errors import ProbeError
from anaphora.probes.answers import error_detail
from anaphora.probes.doctor.finding import Finding
from anaphora.probes.doctor.pages import json_of
from anaphora.probes.doctor.sayings import say
from anaphora.probes.doctor.visit import Outcome, Visit, filler, user

_FIRST = 400
"""Words of the first prompt; each further one is twice as long."""
_SHARE = 0.8
"""A prompt counted shorter than this share of what its words made before was cut."""
_SECONDS = 60.0
"""A prompt that would take longer to read than this is not sent."""
_LIMIT = re.compile(
    r"(?:context length is|context size \(|n_ctx\"?:?\s*|context window of|at most|limit(?: of)?)\D{0,12}?(\d[\d,]*)",
    re.IGNORECASE,
)


async def check_context(visit: Visit) -> Outcome:
    """State changes: limit."""
    advertised = await _advertised(visit)
    visit.limit = advertised
    says = f"advertised: {advertised:,} tokens" if advertised else "no limit advertised"
    if not visit.context_words:
        return Outcome(f"{says}; not tried (--context-words 0)")
    tried: list[tuple[int, int]] = []
    words, rng = _FIRST, random.Random()
    marker = f"zq{rng.randrange(10**6):06d}"
    while words <= visit.context_words and (not advertised or words * 1.2 < advertised):
        try:
            answer = await visit.chat(user(_prompt(marker, words, rng)), 16)
        except ProbeError as error:
            return Outcome(f"{says}; a prompt of about {words:,} words got no answer ({error.kind})")
        if not answer.is_success:
            return _refusal(visit, answer, says, words)
        counted = _count(answer)
        if counted is None:
            recalled = "was" if marker in answer.text else "was not"
            told = f"prompts are not counted (no usage); at {words:,} words the marker {recalled} answered"
            return Outcome(f"{says}; {told}")
        if tried and counted < _SHARE * words * tried[-1][1] / tried[-1][0]:
            finding = _truncated(visit, counted, words, marker, answer)
            visit.limit = counted
            return Outcome(finding.what, (finding,))
        tried.append((words, counted))
        visit.tokens_per_word, visit.seconds_per_token = counted / words, answer.elapsed.total_seconds() / counted
        if answer.elapsed.total_seconds() * 2.5 > min(_SECONDS, visit.timeout):
            break
        words *= 2
    longest = f"up to {tried[-1][1]:,} tokens read whole" if tried else "too short to try"
    return Outcome(f"{says}; {longest}")


def _prompt(marker: str, words: int, rng: random.Random) -> str:
    """A marker at the head, `words` made-up words that no cache knows, and the question for the marker."""
    ignored = filler(rng, words)
    return f"The password is {marker}. Ignore these words: {ignored}\nRepeat the password from the first sentence."


def _truncated(visit: Visit, counted: int, words: int, marker: str, answer: httpx.Response) -> Finding:
    recalled = "answered" if marker in answer.text else "not answered"
    evidence = f"over {words:,} words were counted as {counted:,} tokens; the marker at their head was {recalled}"
    ollama = visit.engine.name == "ollama"
    return say("context.truncated-ollama" if ollama else "context.truncated", evidence, tokens=counted)


def _refusal(visit: Visit, answer: httpx.Response, says: str, words: int) -> Outcome:
    text = error_detail(answer.text)
    found = _LIMIT.search(answer.text)
    if answer.status_code in (400, 413, 422) and (found or "context" in text.lower() or "too long" in text.lower()):
        visit.limit = int(found.group(1).replace(",", "")) if found else visit.limit
        limit = f"{visit.limit:,} tokens" if visit.limit else "not named"
        return Outcome(f"{says}; a longer prompt is refused with {answer.status_code}, as it should be (limit {limit})")
    finding = say("context.fails", text, words=words, status=answer.status_code)
    return Outcome(finding.what, (finding,))


def _count(answer: httpx.Response) -> int | None:
    found = json_of(answer)
    usage = found.get("usage") if isinstance(found, dict) else None
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) and tokens > 0 else None


async def _advertised(visit: Visit) -> int | None:
    """From the entry of /v1/models, llama-server's /props or SGLang's /server_info."""
    entry = next((e for e in visit.entries if visit.chosen in (e.get("id"), e.get("name"))), {})
    for source in (entry, entry.get("meta"), await _json(visit, "/props"), await _json(visit, "/server_info")):
        for key in (
            "max_model_len",
            "context_length",
            "context_window",
            "max_context_length",
            "n_ctx",
            "max_req_input_len",
        ):
            value = _deep(source, key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


async def _json(visit: Visit, path: str) -> Any:
    response = await visit.http.find(path)
    try:
        return json.loads(response.text) if response is not None else None
    except ValueError:
        return None


def _deep(found: Any, key: str) -> Any:
    if not isinstance(found, dict):
        return None
    inner = found.get("default_generation_settings")
    return found[key] if key in found else _deep(inner, key)
