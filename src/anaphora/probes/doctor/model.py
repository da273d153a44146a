"""The model id against /v1/models, and a one-token completion against the OpenAI schema."""

from __future__ import annotations

import difflib
from typing import Any

import httpx

from anaphora.errors import ProbeError
from anaphora.probes.answers import error_detail, is_html
from anaphora.probes.doctor.auth import REFUSED, explain_refusal
from anaphora.probes.doctor.finding import Finding
from anaphora.probes.doctor.pages import json_of
from anaphora.probes.doctor.sayings import say
from anaphora.probes.doctor.visit import Outcome, Visit, user

_SHAPE: tuple[tuple[tuple[str | int, ...], type | tuple[type, ...]], ...] = (
    (("id",), str),
    (("object",), str),
    (("created",), int),
    (("model",), str),
    (("choices", 0, "index"), int),
    (("choices", 0, "message", "role"), str),
    (("choices", 0, "finish_reason"), str),
)
"""Fields of OpenAI's chat.completion that clients with typed answers rely on, and their types."""


async def check_model(visit: Visit) -> Outcome:
    """State changes: entries, chosen."""
    found = json_of(visit.models_answer) if visit.models_answer is not None else None
    entries = found.get("data", found.get("models")) if isinstance(found, dict) else found
    visit.entries = [entry for entry in entries or () if isinstance(entry, dict)]
    names = list(dict.fromkeys(str(entry.get("id") or entry.get("name")) for entry in visit.entries))
    if visit.model is None:
        if not names:
            finding = say("model.none")
            return Outcome(finding.what, (finding,), stop=True)
        visit.chosen = names[0]
        more = f"; {len(names)} are served, the first one is asked (--model chooses)" if len(names) > 1 else ""
        return Outcome(f"{visit.chosen}{more}")
    visit.chosen = visit.model
    if visit.model in names:
        return Outcome(f"{visit.model} is served")
    if not names:
        return Outcome(f"{visit.model}; the server lists none")
    try:
        answer = await visit.chat(user("Hello."), 1)
    except ProbeError as error:
        return Outcome(f"{visit.model} is not listed; asking it: {error}")
    if answer.status_code not in (400, 404, 422):
        return Outcome(f"{visit.model} is not in /v1/models, but the server answers to it ({answer.status_code})")
    near = nearest(visit.model, names)
    served = ", ".join(near or names[:6])
    evidence = f"{answer.status_code}: {error_detail(answer.text)}"
    finding = say("model.unknown", evidence, model=visit.model, served=served, right=(near or names)[0])
    return Outcome(finding.what, (finding,), stop=True)


def nearest(name: str, names: list[str]) -> list[str]:
    """Those of `names` most like `name`, best first: the same but for case or for the part before the slash wins."""
    last = name.lower().rpartition("/")[2].partition(":")[0]
    same = [other for other in names if other.lower().rpartition("/")[2].partition(":")[0] == last]
    low = {other.lower(): other for other in names}
    close = [low[match] for match in difflib.get_close_matches(name.lower(), low, n=3, cutoff=0.5)]
    return list(dict.fromkeys([*same, *close]))[:3]


async def check_completion(visit: Visit) -> Outcome:
    """State changes: completion."""
    messages = user("Say hello.")
    try:
        answer = await visit.chat(messages, 1)
    except ProbeError as error:
        finding = say("completion.unreachable", error.kind, problem=error)
        return Outcome(str(error), (finding,), stop=True, unreachable=True)
    if answer.status_code in REFUSED and not is_html(answer.text):
        finding = await explain_refusal(visit, answer, lambda headers: visit.chat(messages, 1, headers))
        return Outcome(finding.what, (finding,), stop=True)
    wrong = _refused(visit, answer) or _no_completion(answer)
    if wrong is not None:
        return Outcome(wrong.what, (wrong,), stop=True, unreachable=answer.status_code in (502, 503, 504))
    visit.completion = answer.json()
    missing = [_name(path) for path, kind in _SHAPE if not isinstance(_at(visit.completion, path), kind)]
    seconds = f"one token in {answer.elapsed.total_seconds():.2f} s"
    if not missing:
        return Outcome(f"{seconds}; shaped as OpenAI's")
    finding = say("completion.shape", seconds, missing=", ".join(missing))
    return Outcome(f"{seconds}; {finding.what}", (finding,))


def _refused(visit: Visit, answer: httpx.Response) -> Finding | None:
    if answer.is_success:
        return None
    status, said = answer.status_code, error_detail(answer.text)
    if status in (400, 404, 422) and "template" in said.lower():
        code = "completion.no-template"
    elif status == 404 and "model" in said.lower():
        code = "model.unknown"
    elif status in (404, 405):
        code = "completion.no-route"
    elif status in (502, 503, 504) or is_html(answer.text):
        code = "completion.gateway"
    elif status == 429:
        code = "http.limit"
    else:
        code = "completion.error" if status >= 500 else "completion.refused"
    evidence = f"POST {answer.request.url.path} answered {status}: {said}"
    served = [str(entry.get("id")) for entry in visit.entries] or ["none that it lists"]
    shown = ", ".join(served[:6])
    return say(code, evidence, status=status, said=said, model=visit.chosen, served=shown, right=served[0])


def _no_completion(answer: httpx.Response) -> Finding | None:
    text = answer.text
    if not text.strip():
        return say("completion.empty", "0 bytes")
    if is_html(text):
        return say("completion.html", f"{answer.status_code} {answer.headers.get('content-type', '')}")
    found = json_of(answer)
    if found is None:
        return say("completion.not-json", f"it begins: {text.strip()[:60]!r}")
    if isinstance(found, dict) and found.get("error"):
        return say("completion.hidden-error", said=error_detail(text))
    if not isinstance(_at(found, ("choices", 0, "message")), dict):
        keys = ", ".join(found) if isinstance(found, dict) else type(found).__name__
        return say("completion.no-choices", f"it has: {keys}")
    return None


def _at(found: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        try:
            found = found[part]
        except (KeyError, IndexError, TypeError):
            return None
    return found


def _name(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
