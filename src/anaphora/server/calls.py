"""What the inference routes share: who may call, which model, and how the body becomes work for the engine."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from fastapi import Request
from starlette.responses import Response

from anaphora.engine.loop import EngineLoop
from anaphora.engine.params import SamplingParams
from anaphora.engine.tokenizer import Tokenizer
from anaphora.errors import InvalidRequest
from anaphora.server.auth import caller, salt_for
from anaphora.server.generation import Generation
from anaphora.server.requests import ChatRequest, Message, SamplingFields, TokenizeRequest
from anaphora.server.responses import REQUEST_ID_HEADER, to_json
from anaphora.server.settings import ServerState

_DIRECT = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)
"""Fields that mean the same in a request and in SamplingParams, where the defaults stand."""

_TEMPLATE_ARGUMENTS = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})
_SEED_SPAN = 2**64

PIN_HEADER = "X-Anaphora-Pin"
"""Seconds for which the blocks of a request are kept after its end, within the pool's bound for pins."""
MOST_PIN_SECONDS = 86400
EXPLAIN_HEADER = "X-Anaphora-Explain"
"""1: the answer says where the prompt's keys and values came from (responses.Explain)."""


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def begin(request: Request, model: str | None) -> tuple[EngineLoop, str]:
    """The engine and the name to answer with; raises UnknownModel, EngineUnavailable."""
    state = state_of(request)
    name = state.resolve_model(model)
    return state.require_engine(), name


def header(prefix: str, model: str) -> dict[str, Any]:
    """The fields that every answer, and every chunk of one, begins with."""
    return {"id": f"{prefix}-{secrets.token_hex(16)}", "created": int(time.time()), "model": model}


def json_answer(model: Any, request_id: str | None = None) -> Response:
    headers = {REQUEST_ID_HEADER: request_id} if request_id is not None else None
    return Response(to_json(model), headers=headers, media_type="application/json")


def submit(
    request: Request,
    body: SamplingFields,
    engine: EngineLoop,
    request_id: str,
    prompts: Sequence[Sequence[int]],
    choices: Sequence[SamplingParams],
) -> Generation:
    """Start all sequences of a request, or none; raises what EngineLoop.submit raises."""
    state = state_of(request)
    salt = salt_for(request.scope, state.settings, body.cache_salt)
    pin = _pin_seconds(request, engine)
    generation = Generation(engine, request_id, prompts, choices, salt, pin, explains=_explains(request))
    generation.start()
    if state.settings.salt_by_key:
        state.owners.put(request_id, caller(request.scope))
    return generation


def _pin_seconds(request: Request, engine: EngineLoop) -> float:
    """From the header X-Anaphora-Pin; 0 without one. Raises InvalidRequest."""
    given = request.headers.getlist(PIN_HEADER)
    if not given:
        return 0.0
    if not engine.prefix_caching:
        raise InvalidRequest(
            f"`{PIN_HEADER}` asks to keep cached blocks, and this server runs without prefix caching. Leave it out, or "
            "start the server without --no-enable-prefix-caching.",
            param=PIN_HEADER,
        )
    try:
        (seconds,) = map(float, given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST_PIN_SECONDS or "_" in given[0]:
        raise InvalidRequest(
            f"`{PIN_HEADER}` is {', '.join(given)!r}; it must be one number of seconds above 0, and at most "
            f"{MOST_PIN_SECONDS:,} (a day). Leave it out to pin nothing.",
            param=PIN_HEADER,
            code="invalid_header",
        )
    return seconds


def _explains(request: Request) -> bool:
    """From the header X-Anaphora-Explain. Raises InvalidRequest."""
    given = request.headers.get(EXPLAIN_HEADER, "0")
    if given not in ("0", "1"):
        raise InvalidRequest(
            f"`{EXPLAIN_HEADER}` is {given!r}; it must be 1, or be left out.",
            param=EXPLAIN_HEADER,
            code="invalid_header",
        )
    return given == "1"


def choices(
    body: SamplingFields, engine: EngineLoop, *, max_tokens: int | None, logprobs: int | None
) -> list[SamplingParams]:
    """One set per choice; choice i of a seeded request has seed + i. Raises InvalidRequest."""
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise InvalidRequest(f"`min_tokens` is above the limit of {max_tokens} new tokens.", param="min_tokens")
    stop_token_ids = tuple(set(body.stop_token_ids or ()))
    for token_id in stop_token_ids:
        _check_token_id(token_id, engine, "stop_token_ids")
    never = engine.tokenizer.eos_token_ids.union(stop_token_ids) if body.min_tokens else frozenset()
    if sum(token_id < engine.vocab_size for token_id in never) == engine.vocab_size:
        raise InvalidRequest(
            "`min_tokens` forbids the tokens that end an answer, and `stop_token_ids` makes every token one. "
            "Leave one of them out.",
            param="stop_token_ids",
        )
    logit_bias = _logit_bias(body.logit_bias or {}, engine)
    given = {name: value for name in _DIRECT if (value := getattr(body, name)) is not None}
    return [
        SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            seed=None if body.seed is None else _wrap(body.seed + index),
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            stop_token_ids=stop_token_ids,
            logit_bias=logit_bias,
            **given,
        )
        for index in range(body.n or 1)
    ]


def encode_messages(tokenizer: Tokenizer, body: ChatRequest | TokenizeRequest) -> list[int]:
    """Token ids of the chat as the model's template writes it. Raises InvalidRequest."""
    variables = body.chat_template_kwargs or {}
    if clash := sorted(_TEMPLATE_ARGUMENTS & variables.keys()):
        raise InvalidRequest(
            f"`chat_template_kwargs` may not hold `{clash[0]}`; give it as a field of the request.",
            param="chat_template_kwargs",
        )
    goes_on = bool(body.continue_final_message)
    return tokenizer.encode_chat(
        [_plain(message) for message in body.messages or ()],
        tools=body.tools if isinstance(body, ChatRequest) else None,
        add_generation_prompt=not goes_on if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=goes_on,
        **variables,
    )


def _plain(message: Message) -> dict[str, Any]:
    """As templates expect it: text parts joined as they are, and `developer` by its older name."""
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    if message.tool_calls:
        plain["tool_calls"] = [_with_parsed_arguments(call) for call in message.tool_calls]
    if message.role == "developer":
        plain["role"] = "system"
    return plain


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The API has a call's arguments as JSON in a string; templates write them out as JSON themselves."""
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    return call


def _logit_bias(given: dict[str, float], engine: EngineLoop) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise InvalidRequest(f"`logit_bias` has the key {key!r}; keys must be token ids.", param="logit_bias")
        _check_token_id(int(key), engine, "logit_bias")
        bias[int(key)] = value
    return bias


def _check_token_id(token_id: int, engine: EngineLoop, param: str) -> None:
    if token_id >= engine.vocab_size:
        raise InvalidRequest(
            f"`{param}` has the token id {token_id}; the vocabulary ends at {engine.vocab_size - 1}.", param=param
        )


def _wrap(seed: int) -> int:
    """Into the signed 64-bit range, which the API promises."""
    return (seed + _SEED_SPAN // 2) % _SEED_SPAN - _SEED_SPAN // 2
