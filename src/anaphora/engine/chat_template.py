"""Chat templates: Jinja as Hugging Face's `apply_chat_template` runs it, in a sandbox that also stops endless loops.

Conventions (https://huggingface.co/docs/transformers/chat_templating_writing): trim_blocks, lstrip_blocks, loop
controls, `raise_exception`, `strftime_now`, `tojson` that keeps Unicode, and a `generation` tag that changes nothing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anaphora.errors import ConfigError, CorruptModel, InvalidRequest

_MAX_ITERATIONS = 200_000
"""Passes through `for` bodies that one rendering may take, all loops together."""

_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the final message; ends in a space, so templates that trim can be told from those that do not."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message's reasoning arrives; templates read the first, or `thinking`."""

_iterations: ContextVar[Iterator[int]] = ContextVar("_iterations")


class _RaisedByTemplate(TemplateError):
    """The template called raise_exception: its message is meant for the caller as it is."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks training text; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        del self.globals["lipsum"]  # makes as much text as it is asked for

    def count_iteration(self) -> None:
        """Called at the start of every `for` body; see ChatTemplate."""
        if next(_iterations.get()) >= _MAX_ITERATIONS:
            raise SecurityError(f"it loops more than {_MAX_ITERATIONS} times")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _RaisedByTemplate(message)


class ChatTemplate:
    """One compiled template. Immutable; may render in several threads at once. Raises ConfigError on bad syntax."""

    def __init__(self, source: str) -> None:
        self.source = source
        environment = _Environment()
        try:
            tree = environment.parse(source)
            for loop in tree.find_all(nodes.For):
                count = nodes.Call(nodes.EnvironmentAttribute("count_iteration"), [], [], None, None)
                loop.body.insert(0, nodes.ExprStmt(count, lineno=loop.lineno))
            self._template = environment.from_string(tree)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"The chat template is not valid Jinja (line {error.lineno}): {error.message}. "
                "Correct it, or pass another one with --chat-template FILE."
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt's text. `variables` are the special tokens and what the caller adds.

        Keys whose value is None are taken out of the messages first. Raises InvalidRequest with the template's own
        message when the template raises, and a short account of the reason when it cannot be rendered.
        """
        try:
            chat = [_plain_message(message) for message in messages]
        except RecursionError as error:
            raise InvalidRequest("The messages are nested too deeply: flatten them.", param="messages") from error
        if not chat:
            raise InvalidRequest("messages is empty: send at least one message.", param="messages")
        final = ""
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message continues the last message and add_generation_prompt opens a new one: "
                    "set only one of them.",
                    param="continue_final_message",
                )
            final = _mark_end(chat[-1])
        context = {"tools": tools, "documents": None, **variables}
        context |= {"messages": chat, "add_generation_prompt": add_generation_prompt}
        text = self._render(context)
        return _cut_at_mark(text, final) if continue_final_message else text

    def _render(self, context: dict[str, Any]) -> str:
        token = _iterations.set(itertools.count())
        try:
            return self._template.render(context)
        except _RaisedByTemplate as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except (
            TemplateError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
        ) as error:
            raise InvalidRequest(
                f"The model's chat template cannot render these messages: {error}. "
                "Check the roles and that each content has the form the model expects (usually a plain string).",
                param="messages",
            ) from error
        finally:
            _iterations.reset(token)


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of one message: plain containers (the template may change nothing of the caller's), no None values."""
    plain = {key: _copy(value) for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value


def _mark_end(message: dict[str, Any]) -> str:
    """Put the mark after the message's text, in place; returns that text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_HERE
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _CONTINUE_HERE
            return text
    raise InvalidRequest(
        "continue_final_message needs a last message with text in its content: add it, or leave the option out.",
        param="continue_final_message",
    )


def _cut_at_mark(text: str, final: str) -> str:
    at = text.rfind(_CONTINUE_HERE.strip())
    if at < 0 or final.strip() not in text:
        raise InvalidRequest(
            "The model's chat template changes or leaves out the last message, so it cannot be continued: "
            "leave continue_final_message out.",
            param="continue_final_message",
        )
    kept = text.startswith(_CONTINUE_HERE, at)
    return text[:at] if kept else text[:at].rstrip()


def read_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Sources by name ("default", "tool_use", ...); files win over tokenizer_config.json. Empty when there are none.

    Raises CorruptModel for a file that is not UTF-8 text or an entry of the wrong form.
    """
    entry = tokenizer_config.get("chat_template")
    try:
        files = {"default": folder / "chat_template.jinja"} if (folder / "chat_template.jinja").is_file() else {}
        files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        if files:
            return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        if isinstance(entry, list):
            return {str(item["name"]): str(item["template"]) for item in entry}
    except (UnicodeDecodeError, KeyError, TypeError) as error:
        raise CorruptModel(
            f"The chat template in {folder} cannot be read ({error}): download the model again, "
            "or pass one with --chat-template FILE."
        ) from error
    if isinstance(entry, dict):
        return {str(name): str(source) for name, source in entry.items()}
    return {"default": entry} if isinstance(entry, str) else {}


def choose(sources: Mapping[str, str], tools: Sequence[Any] | None) -> str:
    """The source for this request: "tool_use" when there are tools and such a template, else "default".

    Raises InvalidRequest when there is none.
    """
    for name in ("tool_use", "default") if tools is not None else ("default",):
        if name in sources:
            return sources[name]
    raise InvalidRequest(
        "The model has no chat template: use /v1/completions, or start the server with --chat-template FILE.",
        param="messages",
    )
