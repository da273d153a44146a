"""Chats through a tokenizer: which template is taken, and what it is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from anaphora.engine.tokenizer import Tokenizer
from anaphora.errors import ConfigError, CorruptModel, InvalidRequest

MakeFolder = Callable[..., Path]
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|end|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|end|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "Hello"}]


def test_chats_have_one_bos(tokenizer_folder: MakeFolder, small_tokenizers: dict[str, Path]) -> None:
    ours = Tokenizer.from_folder(small_tokenizers["byte_level"], chat_template=CHATML)
    assert ours.chat_template == CHATML
    assert ours.render_chat(CHAT) == "<|bos|><|end|>user\nHello<|end|>assistant\n"
    ids = ours.encode_chat(CHAT)
    assert ids[:2] == [0, 2]
    assert ids.count(0) == 1
    assert ids == ours.encode(ours.render_chat(CHAT)[len("<|bos|>") :])
    assert (ours.bos_token, ours.eos_token) == ("<|bos|>", "<|eos|>")


def test_variables_of_the_caller_reach_the_template(small_tokenizers: dict[str, Path]) -> None:
    source = "{{ bos_token }}{{ enable_thinking }}{{ messages | length }}{{ tools }}"
    ours = Tokenizer.from_folder(small_tokenizers["byte_level"], chat_template=source)
    assert ours.render_chat(CHAT, enable_thinking=False, bos_token="B") == "BFalse1None"


def test_templates_are_chosen_by_name(small_tokenizers: dict[str, Path], tokenizer_folder: MakeFolder) -> None:
    backend = tokenizers.Tokenizer.from_file(str(small_tokenizers["byte_level"] / "tokenizer.json"))
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = tokenizer_folder(backend, tokenizer_config={"chat_template": named})
    ours = Tokenizer.from_folder(folder)
    assert ours.chat_template == "plain"
    assert ours.render_chat(CHAT) == "plain"
    assert ours.render_chat(CHAT, tools=[{"type": "function"}]) == "tools"
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_folder(folder).render_chat(CHAT, tools=[{}]) == "from the file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools from the folder")
    assert Tokenizer.from_folder(folder).render_chat(CHAT, tools=[{}]) == "tools from the folder"
    assert Tokenizer.from_folder(folder, chat_template="mine").render_chat(CHAT, tools=[{}]) == "mine"


def test_no_template_and_broken_templates(small_tokenizers: dict[str, Path], tokenizer_folder: MakeFolder) -> None:
    none = Tokenizer.from_folder(small_tokenizers["byte_level"])
    assert none.chat_template is None
    with pytest.raises(InvalidRequest, match=r"/v1/completions.*--chat-template"):
        none.render_chat(CHAT)
    with pytest.raises(ConfigError, match="line 2"):
        Tokenizer.from_folder(small_tokenizers["byte_level"], chat_template="\n{% for %}")
    backend = tokenizers.Tokenizer.from_file(str(small_tokenizers["byte_level"] / "tokenizer.json"))
    broken = Tokenizer.from_folder(tokenizer_folder(backend, tokenizer_config={"chat_template": "{% if %}"}))
    with pytest.raises(InvalidRequest, match="--chat-template"):
        broken.render_chat(CHAT)
    wrong = tokenizer_folder(backend, tokenizer_config={"chat_template": [{"name": "default"}]})
    with pytest.raises(CorruptModel, match="chat template"):
        Tokenizer.from_folder(wrong)
