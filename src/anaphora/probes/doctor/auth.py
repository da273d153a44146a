"""401 and 403: which of their causes it is, found by asking again with one thing changed."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping

import httpx

from anaphora.errors import ProbeError
from anaphora.probes.answers import error_detail
from anaphora.probes.doctor.finding import Finding
from anaphora.probes.doctor.keys import belongs_elsewhere, cleaned, expired_at, flaws
from anaphora.probes.doctor.sayings import say
from anaphora.probes.doctor.visit import Outcome, Visit

Headers = Mapping[str, str | None]
Attempt = Callable[[Headers], Awaitable[httpx.Response]]
"""Sends the request that was refused again, with some headers changed."""

REFUSED = (401, 403)
_CREDENTIALS = ("authorization", "x-api-key", "api-key")
_EXPIRED = re.compile(r"expired|has lapsed|no longer valid|invalid_token", re.IGNORECASE)


async def check_auth(visit: Visit) -> Outcome:
    answer = visit.models_answer
    if answer is None or answer.status_code not in REFUSED:
        how = "accepted, or not asked for" if visit.api_key else "not asked for so far"
        return Outcome(f"key {how}", _held_flaws(visit))
    url = f"{visit.endpoint.api_base}/models"
    finding = await explain_refusal(visit, answer, lambda headers: visit.send("GET", url, headers=headers))
    return Outcome(f"{answer.status_code}: {finding.what}", (finding,), stop=True)


async def explain_refusal(visit: Visit, answer: httpx.Response, attempt: Attempt) -> Finding:
    """Why `answer` is a 401 or 403."""
    said = error_detail(answer.text)
    evidence = f"{answer.status_code}: {said}" if said else str(answer.status_code)
    sent = {name.lower(): value for name, value in visit.endpoint.request_headers().items()}
    given = [name for name in _CREDENTIALS if name in sent]
    unfilled = [flaw for flaw in flaws(visit.api_key or "") if "placeholder" in flaw or "variable" in flaw]
    if unfilled:
        return say("auth.key-text", evidence, problem=unfilled[0])
    if not given:
        return say("auth.no-key", evidence)
    if len(given) > 1:
        return await _both(given, evidence, attempt)
    key = cleaned(sent[given[0]])
    other = await _other_header(given[0], sent[given[0]], key, evidence, attempt)
    return other or _wrong_key(visit, answer, key, f"{said} {answer.headers.get('www-authenticate', '')}", evidence)


async def _other_header(name: str, value: str, key: str, evidence: str, attempt: Attempt) -> Finding | None:
    """The same key in another header."""
    bare = name == "authorization" and not value.lower().startswith("bearer ")
    if bare and await _accepted(attempt, {"authorization": f"Bearer {key}"}):
        return say("auth.no-bearer", f"{evidence}; with Bearer it is accepted")
    for other in _CREDENTIALS:
        carried = f"Bearer {key}" if other == "authorization" else key
        if other != name and await _accepted(attempt, {**dict.fromkeys(_CREDENTIALS), other: carried}):
            right = f"{other}: {'Bearer ' if other == 'authorization' else ''}KEY"
            return say("auth.scheme", f"{evidence}; the same key is accepted in `{other}`", header=other, right=right)
    return None


def _wrong_key(visit: Visit, answer: httpx.Response, key: str, said: str, evidence: str) -> Finding:
    ended = expired_at(key)
    if ended is not None or _EXPIRED.search(said):
        when = f" on {time.strftime('%Y-%m-%d %H:%M', time.gmtime(ended))} UTC" if ended else ""
        return say("auth.expired", evidence, when=when)
    if owner := belongs_elsewhere(key, visit.endpoint.host):
        return say("auth.other-provider", evidence, owner=owner, host=visit.endpoint.host)
    return say("auth.forbidden" if answer.status_code == 403 else "auth.wrong-key", evidence)


async def _both(given: list[str], evidence: str, attempt: Attempt) -> Finding:
    names = " and ".join(given)
    for name in given:
        rest: dict[str, str | None] = {other: None for other in given if other != name}
        if await _accepted(attempt, rest):
            told = f"{evidence}; with `{name}` alone it is accepted"
            return say("auth.both", told, names=names, drop=", ".join(f"`{other}`" for other in rest))
    return say("auth.both", f"{evidence}; each alone is refused too", names=names, drop="one of them")


async def _accepted(attempt: Attempt, headers: Headers) -> bool:
    try:
        return (await attempt(headers)).status_code not in REFUSED
    except ProbeError:
        return False


def _held_flaws(visit: Visit) -> tuple[Finding, ...]:
    """Flaws of a key that did no harm here because it was cleaned (a placeholder may be meant: nobody looked at it)."""
    found = [flaw for flaw in flaws(visit.api_key or "") if "placeholder" not in flaw]
    if not found:
        return ()
    return (
        say("auth.key-text", "accepted here once cleaned; other clients send it as it is", problem=" and ".join(found)),
    )
