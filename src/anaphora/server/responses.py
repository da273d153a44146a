"""The shapes of what the server answers: OpenAI's, with `stop_reason` and `cached_tokens` always there."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel

Finish = Literal["stop", "length"]
REQUEST_ID_HEADER = "X-Request-Id"
"""Of a generated answer, whole or streamed: its `id`."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int
    """Prompt tokens whose keys and values were reused."""


class Usage(BaseModel):
    """Each prompt counts once however many choices it has; completion tokens are those of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class SourceTokens(BaseModel):
    tokens: int
    seconds: float


class Explain(BaseModel):
    """Where the keys and values of the prompts came from; tokens of all together are `usage.prompt_tokens`.

    Asked for with X-Anaphora-Explain: 1. Each prompt counts once, as its first choice found it.
    """

    pool: SourceTokens
    ram: SourceTokens
    disk: SourceTokens
    remote: SourceTokens
    computed: SourceTokens


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobItem(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprobItem]


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: str | int | None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    explain: Explain | None = None


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    explain: Explain | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None


class Completion(BaseModel):
    """A whole completion, or one chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    explain: Explain | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["anaphora"] = "anaphora"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok", "loading", "draining", "failed"]
    reason: str | None = None


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    prompt: str


class Reset(BaseModel):
    reset: bool
    """False when some blocks were in use; those stay."""


class Version(BaseModel):
    version: str


def to_json(model: BaseModel) -> str:
    """Compact, fields never set left out, ASCII only: some readers split events at U+2028 and its like."""
    return json.dumps(model.model_dump(exclude_unset=True), separators=(",", ":"), allow_nan=False)
