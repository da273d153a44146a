"""The shapes of what clients may send: strict types, OpenAI's bounds, vLLM's extra fields.

`null` always means "the default". What is not declared here is refused by name (see unsupported.py).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from anaphora.errors import InvalidRequest, UnsupportedField
from anaphora.server.unsupported import only_known

MAX_CHOICES = 128
"""Most answers to one request: prompts x choices."""


def _whole_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("string_unicode", "lone surrogate") from error
    return text


Text = Annotated[str, AfterValidator(_whole_unicode)]
"""What JSON can carry and UTF-8 can write."""
StopString = Annotated[Text, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
Item = TypeVar("Item")
Many = Annotated[list[Item], Field(fail_fast=True)]
"""The first wrong item is enough to refuse a list: a million descriptions would hold up everybody else."""


def _first_wrong_bias(biases: Any) -> Any:
    """As Many does, which pydantic has for lists only: of an object with a wrong value, that entry alone."""
    for key, bias in biases.items() if isinstance(biases, dict) else ():
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            return {key: bias}
    return biases


class Body(BaseModel):
    """An object of a request in which every field is known. `where` names it in messages."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    where: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, data: Any) -> Any:
        return only_known(data, cls.model_fields, where=cls.where) if isinstance(data, dict) else data


class TextPart(Body):
    where = "a content part of text"
    type: Literal["text"]
    text: Text


class Message(Body):
    where = "a message"
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Many[TextPart] | None = None
    name: Text | None = None
    tool_calls: Many[dict[str, Any]] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else "text"
            if isinstance(kind, str) and kind != "text":
                raise UnsupportedField(
                    f"A content part of type `{kind}` is not supported: this server reads text only.", param="messages"
                )
        return content

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise InvalidRequest(f"A message of the role `{self.role}` has no `content`; add it.", param="messages")
        return self


class StreamOptions(Body):
    where = "`stream_options`"
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Padding against eavesdroppers; none is ever added."""


class SamplingFields(Body):
    """What both generating routes take, and what they may be told without any effect on the answer."""

    model: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[Many[StopString], Field(max_length=16)] | None = None
    stop_token_ids: Many[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, BeforeValidator(_first_wrong_bias)
    ] = None
    cache_salt: Annotated[Text, Field(min_length=1)] | None = None

    user: Text | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("`stream_options` needs `stream: true`; add it.", param="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class Templated(Body):
    """Messages and how the chat template lays them out."""

    messages: Annotated[Many[Message], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_way_to_end(self) -> Templated:
        check_ending(self.add_generation_prompt, self.continue_final_message)
        return self


class ChatRequest(SamplingFields, Templated):
    where = "/v1/chat/completions"
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: Text | dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs: true`; add it.", param="top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequest(
                f"`max_tokens` ({self.max_tokens}) and `max_completion_tokens` ({self.max_completion_tokens}) "
                "disagree; give one of them.",
                param="max_completion_tokens",
            )
        calls_tools = self.tools and self.tool_choice != "none"
        if calls_tools or self.tool_choice not in (None, "none", "auto"):
            raise UnsupportedField(
                "Tool calls are not parsed here. Leave `tools` and `tool_choice` out, or set `tool_choice` to "
                '"none": the chat template then shows the tools to the model.',
                param="tools" if calls_tools else "tool_choice",
            )
        return self


def _kind_of_prompt(prompt: Any) -> str:
    """Which of the four shapes it is, by its first item."""
    return "text" if isinstance(prompt, str) else f"list of {type(prompt[0]).__name__}"


Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Many[Text], Tag("list of str")]
    | Annotated[Many[TokenId], Tag("list of int")]
    | Annotated[Many[Many[TokenId]], Tag("list of list")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(SamplingFields):
    where = "/v1/completions"
    prompt: Prompt
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_of_four_shapes(cls, prompt: Any) -> Any:
        check_prompt(prompt)
        return prompt

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more, whichever shape they came in."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        answers = len(self.prompts) * (self.n or 1)
        if answers > MAX_CHOICES:
            raise InvalidRequest(
                f"`prompt` and `n` ask for {answers} answers; {MAX_CHOICES} is the most. Send several requests.",
                param="n",
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise UnsupportedField(
                f"`best_of` ({self.best_of}) other than `n` ({self.n or 1}) is not supported; use `n`.", param="best_of"
            )
        if self.echo and self.logprobs is not None:
            raise UnsupportedField(
                "`echo` with `logprobs` is not supported: log probabilities are given for produced tokens only. "
                "Leave one of them out.",
                param="echo",
            )
        return self


class TokenizeRequest(Body):
    """Either `prompt` or `messages`."""

    where = "/tokenize"
    model: Text | None = None
    prompt: Text | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("Give either `prompt` or `messages`.", param="prompt")
        if self.messages is not None and self.add_special_tokens:
            raise UnsupportedField(
                "`add_special_tokens` does not go with `messages`: the chat template writes the special tokens itself.",
                param="add_special_tokens",
            )
        check_ending(self.add_generation_prompt, self.continue_final_message)
        return self


class DetokenizeRequest(Body):
    where = "/detokenize"
    model: Text | None = None
    tokens: Many[TokenId]


def check_ending(add_generation_prompt: bool | None, continue_final_message: bool | None) -> None:
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "`add_generation_prompt` starts a new message and `continue_final_message` goes on with the last: "
            "set one of them.",
            param="continue_final_message",
        )


def check_prompt(prompt: Any) -> None:
    """Raises InvalidRequest unless it is a string or a list, not empty, of items of one kind."""
    if isinstance(prompt, str):
        return
    kinds = {type(item) for item in prompt} if isinstance(prompt, list) else set()
    if len(kinds) != 1 or not kinds <= {str, int, list}:
        raise InvalidRequest(
            "`prompt` must be a string, a list of strings, a list of token ids, or a list of lists of token ids; "
            "lists must not be empty or mixed.",
            param="prompt",
        )
