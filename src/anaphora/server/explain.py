"""GET /explain and /explain/{request_id}: what was reused of each prompt, and why the rest was not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, WithJsonSchema
from starlette.responses import Response

from anaphora.errors import InvalidRequest, UnknownRequest
from anaphora.explain.outcome import Cause, Miss, Outcome, as_dict
from anaphora.explain.wording import advice, reason
from anaphora.server.auth import caller
from anaphora.server.calls import begin, json_answer, state_of
from anaphora.server.documented import errors

router = APIRouter()

SCHEMA_VERSION = 1
DEFAULT_LAST = 20


class DifferenceBody(BaseModel):
    kind: str
    exact: bool
    """Whether `position` is that of the token; else that of its block."""
    before: str | None
    mine: str | None
    theirs: str | None
    after: str | None


class MissBody(BaseModel):
    cause: Cause
    position: int
    tokens: int
    known_tokens: int
    other_request: str | None
    seconds_ago: float | None
    more_blocks: int | None
    more_bytes: int | None
    difference: DifferenceBody | None
    reason: str
    advice: str


class OutcomeBody(BaseModel):
    request_id: str
    time: float
    prompt_tokens: int
    reused: dict[str, int]
    seconds: dict[str, float]
    miss: MissBody | None
    waited_for: str | None
    pinned_tokens: int
    output_tokens: int
    finish_reason: str | None


class Explanations(BaseModel):
    schema_version: int
    requests: list[OutcomeBody]


LAST = WithJsonSchema({"type": "integer", "minimum": 1, "default": DEFAULT_LAST})


@router.get("/explain", response_model=Explanations, responses=errors(400, 401, 500, 503), tags=["Operation"])
async def explain_last(request: Request, last: Annotated[str, Query(), LAST] = str(DEFAULT_LAST)) -> Response:
    """The latest requests that were admitted, newest first. With --salt-by-key: those of the caller's key."""
    engine, _ = begin(request, None)
    names = [name for name, _ in request.query_params.multi_items()]
    if wrong := sorted(set(names) - {"last"}) or names[1:]:
        raise InvalidRequest(f"`{wrong[0]}`: /explain takes `last`, once, for example ?last=20.", param=wrong[0])
    if not re.fullmatch(r"[0-9]{1,9}", last, re.ASCII) or int(last) < 1:
        raise InvalidRequest(
            "`last` must be a whole number of requests, 1 or more, for example ?last=20.", param="last"
        )
    ring = engine.explainer.outcomes
    return _answer(_visible(request, ring.last(ring.limit))[: int(last)])


@router.get(
    "/explain/{request_id:path}", response_model=Explanations, responses=errors(401, 404, 500, 503), tags=["Operation"]
)
async def explain_one(request_id: str, request: Request) -> Response:
    """The sequences of one answer: its `id` (also in the header X-Request-Id), or that of one sequence, `id-0`."""
    engine, _ = begin(request, None)
    ring = engine.explainer.outcomes
    found = _visible(request, ring.find(request_id))
    if not found:
        raise UnknownRequest(
            f"No outcome of the request `{request_id}` is known: give the `id` of an answer. Remembered are the last "
            f"{ring.limit:,} requests that were admitted; GET /explain lists them.",
            param="request_id",
        )
    return _answer(found)


def _answer(outcomes: Iterable[Outcome]) -> Response:
    return json_answer(Explanations(schema_version=SCHEMA_VERSION, requests=[_body(each) for each in outcomes]))


def _body(outcome: Outcome) -> OutcomeBody:
    facts = as_dict(outcome)
    if outcome.miss is not None:
        facts["miss"] |= {"reason": reason(outcome.miss), "advice": advice(outcome.miss)}
    return OutcomeBody(**facts)


def _visible(request: Request, outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Where keys have caches of their own, a caller sees its own requests, and nothing that tells of others'."""
    state = state_of(request)
    if not state.settings.salt_by_key:
        return list(outcomes)
    key = caller(request.scope)

    def own(request_id: str) -> bool:
        return state.owners.get(request_id.rpartition("-")[0]) == key

    return [_without_others(each, own) for each in outcomes if own(each.request_id)]


def _without_others(outcome: Outcome, own: Callable[[str], bool]) -> Outcome:
    miss, waited_for = outcome.miss, outcome.waited_for
    if miss is not None and miss.other_request is not None and not own(miss.other_request):
        if miss.cause is Cause.OTHER_NAMESPACE:
            miss = Miss(Cause.NEVER_SEEN, miss.position, miss.tokens)
        else:
            miss = replace(miss, other_request=None)
    return replace(outcome, miss=miss, waited_for=waited_for if waited_for and own(waited_for) else None)
