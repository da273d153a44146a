"""Everything but generation: models, health, metrics, tokens, cache, version."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

import anaphora
from anaphora.errors import InvalidRequest
from anaphora.server.calls import begin, encode_messages, json_answer, state_of
from anaphora.server.documented import BODY_ERRORS, HEALTH, errors
from anaphora.server.errors import RETRY_AFTER_SECONDS
from anaphora.server.requests import DetokenizeRequest, TokenizeRequest
from anaphora.server.responses import Health, ModelCard, ModelList, Reset, Text, Tokens, Version, to_json

router = APIRouter()


@router.get("/v1/models", response_model=ModelList, responses=errors(401, 500, 503), tags=["OpenAI"])
async def list_models(request: Request) -> Response:
    """The names that requests may use; each stands for the one model that is served."""
    names = state_of(request).settings.served_model_names
    return json_answer(ModelList(object="list", data=[_card(request, name) for name in names]))


@router.get(
    "/v1/models/{model_id:path}", response_model=ModelCard, responses=errors(401, 404, 500, 503), tags=["OpenAI"]
)
async def retrieve_model(model_id: str, request: Request) -> Response:
    """One of the served names."""
    return json_answer(_card(request, model_id))


def _card(request: Request, name: str) -> ModelCard:
    engine, name = begin(request, name)
    created = state_of(request).created
    return ModelCard(id=name, object="model", created=created, owned_by="anaphora", max_model_len=engine.max_model_len)


@router.get("/health", response_model=Health, responses=HEALTH, tags=["Operation"])
async def health(request: Request) -> Response:
    """200 when requests are taken; 503 while the model loads, while the server drains, and after a failure."""
    condition, reason = state_of(request).condition()
    if condition == "ok":
        return json_answer(Health(status=condition))
    return Response(
        to_json(Health(status=condition, reason=reason)),
        503,
        {"Retry-After": str(RETRY_AFTER_SECONDS)},
        "application/json",
    )


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text."}},
    tags=["Operation"],
)
async def metrics(request: Request) -> Response:
    """Counters and histograms; OpenMetrics for those who accept it."""
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(request.app.state.registry), headers={"Content-Type": media_type})


@router.get("/version", response_model=Version, tags=["Operation"])
async def version() -> Response:
    """The server's own version."""
    return json_answer(Version(version=anaphora.__version__))


@router.post("/tokenize", response_model=Tokens, responses=BODY_ERRORS, tags=["Tokens"])
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    engine, _ = begin(request, body.model)
    tokenizer = engine.tokenizer
    if body.prompt is None:
        ids = await run_in_threadpool(encode_messages, tokenizer, body)
    else:
        special = body.add_special_tokens is not False
        ids = await run_in_threadpool(tokenizer.encode, body.prompt, add_special_tokens=special)
    spelled = [tokenizer.token_text(token_id) or "" for token_id in ids] if body.return_token_strs else None
    return json_answer(Tokens(count=len(ids), max_model_len=engine.max_model_len, tokens=ids, token_strs=spelled))


@router.post("/detokenize", response_model=Text, responses=BODY_ERRORS, tags=["Tokens"])
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    engine, _ = begin(request, body.model)
    if body.tokens and max(body.tokens) >= engine.vocab_size:
        raise InvalidRequest(
            f"`tokens` has the id {max(body.tokens)}; the vocabulary ends at {engine.vocab_size - 1}.", param="tokens"
        )
    text = await run_in_threadpool(engine.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_answer(Text(prompt=text))


@router.post("/reset_prefix_cache", response_model=Reset, responses=errors(401, 413, 500, 503), tags=["Operation"])
async def reset_prefix_cache(request: Request) -> Response:
    """Forget every cached block that no running request uses."""
    engine, _ = begin(request, None)
    return json_answer(Reset(reset=await run_in_threadpool(engine.reset_prefix_cache)))
