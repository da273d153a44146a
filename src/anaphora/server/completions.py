"""POST /v1/completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from anaphora.engine.params import RequestOutput
from anaphora.engine.tokenizer import Tokenizer
from anaphora.server.calls import begin, choices, header, json_answer, submit
from anaphora.server.documented import GENERATION
from anaphora.server.generation import Generation, finish
from anaphora.server.logprobs import completion_logprobs
from anaphora.server.requests import CompletionRequest
from anaphora.server.responses import Completion, CompletionChoice, CompletionLogprobs
from anaphora.server.stream import EventStream

router = APIRouter()

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this route."""


@router.post("/v1/completions", response_model=Completion, responses=GENERATION, tags=["OpenAI"])
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one or more prompts, whole or as a stream of events. Choice c of prompt p has the index p * n + c."""
    engine, model = begin(request, body.model)
    params = choices(body, engine, max_tokens=body.max_tokens or DEFAULT_MAX_TOKENS, logprobs=body.logprobs)
    prompts, echoes = await run_in_threadpool(_read_prompts, engine.tokenizer, body)
    head = header("cmpl", model)
    generation = submit(request, body, engine, head["id"], prompts, params)
    if body.stream:
        return EventStream(generation, _chunks(generation, body, engine.tokenizer, head, echoes))
    answers = await generation.answers(request.receive)
    return json_answer(
        Completion(
            **head,
            object="text_completion",
            choices=[
                CompletionChoice(
                    index=index,
                    text=echoes[index // len(params)] + answer.text,
                    logprobs=_logprobs(body, engine.tokenizer, answer.outputs, 0),
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
    generation: Generation, body: CompletionRequest, tokenizer: Tokenizer, head: dict[str, Any], echoes: Sequence[str]
) -> AsyncIterator[Completion]:
    """Per choice: text, beginning with the echo if asked for, then why it ended. At the very end: usage, explain."""
    usage_so_far: dict[str, Any] = {"usage": None} if body.include_usage else {}

    def chunk(index: int, text: str, **more: Any) -> Completion:
        choice = CompletionChoice(index=index, text=text, **({"logprobs": None, "finish_reason": None} | more))
        return Completion(**head, object="text_completion", choices=[choice], **usage_so_far)

    written: Counter[int] = Counter()
    begun: set[int] = set()
    async for index, output in generation.outputs():
        if index not in begun:
            begun.add(index)
            if echo := echoes[index // (body.n or 1)]:
                yield chunk(index, echo)
        if output.text or output.logprobs:
            yield chunk(index, output.text, logprobs=_logprobs(body, tokenizer, [output], written[index]))
            written[index] += len(output.text)
        if output.finish_reason is not None:
            ended = {"finish_reason": finish(output.finish_reason), "stop_reason": output.stop_reason}
            yield chunk(index, "", **ended)
    ending: dict[str, Any] = generation.explained() | ({"usage": generation.usage()} if body.include_usage else {})
    if ending:
        yield Completion(**head, object="text_completion", choices=[], **ending)


def _read_prompts(tokenizer: Tokenizer, body: CompletionRequest) -> tuple[list[list[int]], list[str]]:
    """Token ids of each prompt, and the text that its choices begin with ("" without `echo`)."""
    prompts, texts = [], []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            prompts.append(tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is not False))
            texts.append(prompt if body.echo else "")
        else:
            prompts.append(prompt)
            skip = body.skip_special_tokens is not False
            texts.append(tokenizer.decode(prompt, skip_special_tokens=skip) if body.echo else "")
    return prompts, texts


def _logprobs(
    body: CompletionRequest, tokenizer: Tokenizer, outputs: Sequence[RequestOutput], offset: int
) -> CompletionLogprobs | None:
    return None if body.logprobs is None else completion_logprobs(tokenizer, outputs, offset)
