"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from anaphora.engine.params import TokenLogprob
from anaphora.engine.tokenizer import Tokenizer
from anaphora.server.calls import begin, choices, encode_messages, header, json_answer, submit
from anaphora.server.documented import GENERATION
from anaphora.server.generation import Generation, finish
from anaphora.server.logprobs import chat_logprobs
from anaphora.server.requests import ChatRequest
from anaphora.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from anaphora.server.stream import EventStream

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=GENERATION, tags=["OpenAI"])
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, whole or as a stream of events."""
    engine, model = begin(request, body.model)
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    top = (body.top_logprobs or 0) if body.logprobs else None
    params = choices(body, engine, max_tokens=max_tokens, logprobs=top)
    prompt = await run_in_threadpool(encode_messages, engine.tokenizer, body)
    head = header("chatcmpl", model)
    generation = submit(request, body, engine, head["id"], [prompt], params)
    if body.stream:
        return EventStream(generation, _chunks(generation, body, engine.tokenizer, head))
    answers = await generation.answers(request.receive)
    return json_answer(
        ChatCompletion(
            **head,
            object="chat.completion",
            choices=[
                ChatChoice(
                    index=index,
                    message=ChatMessage(role="assistant", content=answer.text, refusal=None),
                    logprobs=_logprobs(body, engine.tokenizer, chain(*(each.logprobs for each in answer.outputs))),
                    finish_reason=answer.finish_reason,
                    stop_reason=answer.stop_reason,
                )
                for index, answer in enumerate(answers)
            ],
            usage=generation.usage(),
            **generation.explained(),
        ),
        head["id"],
    )


async def _chunks(
    generation: Generation, body: ChatRequest, tokenizer: Tokenizer, head: dict[str, Any]
) -> AsyncIterator[ChatChunk]:
    """Per choice: its role with the first output, then text, then why it ended. At the very end: usage, explain."""
    usage_so_far: dict[str, Any] = {"usage": None} if body.include_usage else {}

    def chunk(index: int, delta: ChatDelta, **more: Any) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, **({"logprobs": None, "finish_reason": None} | more))
        return ChatChunk(**head, object="chat.completion.chunk", choices=[choice], **usage_so_far)

    begun: set[int] = set()
    async for index, output in generation.outputs():
        if index not in begun:
            begun.add(index)
            yield chunk(index, ChatDelta(role="assistant", content=""))
        if output.text or output.logprobs:
            logprobs = _logprobs(body, tokenizer, output.logprobs)
            yield chunk(index, ChatDelta(content=output.text), logprobs=logprobs)
        if output.finish_reason is not None:
            ended = {"finish_reason": finish(output.finish_reason), "stop_reason": output.stop_reason}
            yield chunk(index, ChatDelta(), **ended)
    ending: dict[str, Any] = generation.explained() | ({"usage": generation.usage()} if body.include_usage else {})
    if ending:
        yield ChatChunk(**head, object="chat.completion.chunk", choices=[], **ending)


def _logprobs(body: ChatRequest, tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> ChatLogprobs | None:
    return chat_logprobs(tokenizer, entries) if body.logprobs else None
