"""`anaphora replay --tokenizer FOLDER`: the prompts of a chat log as that model's server splits them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anaphora.errors import ConfigError
from anaphora.replay.readers.base import BadLine

if TYPE_CHECKING:
    from anaphora.replay.readers.chats import Tokenize


def tokenizer_of(folder: Path) -> Tokenize:
    """Raises ConfigError (packages are missing), CorruptModel and UnsupportedModel."""
    try:
        from anaphora.engine.tokenizer import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"--tokenizer needs {error.name}, which the light install leaves out: pip install 'anaphora[serve]'"
        ) from None
    tokenizer = Tokenizer.from_folder(folder)

    def tokenize(request: Mapping[str, Any]) -> list[int]:
        prompt = request.get("prompt")
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        if prompt is not None:
            if all(type(token) is int and 0 <= token < 1 << 32 for token in prompt):
                return list(prompt)
            raise BadLine("`prompt` is neither a text nor a list of token ids")
        extra = request.get("chat_template_kwargs")
        try:
            messages = [_plain(message) for message in request["messages"]]
            return tokenizer.encode_chat(
                messages, tools=request.get("tools"), **(extra if isinstance(extra, dict) else {})
            )
        except (TypeError, AttributeError, KeyError) as error:
            raise BadLine(f"the messages have another form than OpenAI's ({error})") from None

    return tokenize


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """As the server gives it to the template: text parts joined, `developer` by its older name."""
    plain = dict(message)
    if isinstance(plain.get("content"), list):
        plain["content"] = "".join(part["text"] for part in plain["content"])
    if plain.get("role") == "developer":
        plain["role"] = "system"
    return plain
