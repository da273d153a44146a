from __future__ import annotations

import threading
from datetime import datetime
from typing import Any

import pytest

from anaphora.engine.chat_template import ChatTemplate
from anaphora.errors import ConfigError, InvalidRequest

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {% generation %}
        {%- if message.reasoning_content is defined %}
            {{- '<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function | tojson(indent=2) + '</tool_call>' }}
        {%- endfor %}
        {% endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}
<think></think>
{% endif %}
{% endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['content'] is string %}{{- message['content'] | trim }}{%- else %}
        {%- for part in message['content'] if part['type'] == 'text' %}{{- part['text'] }}{%- endfor %}
    {%- endif %}{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
{#- {{ ns.count }} messages #}
"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% macro turn(role, text) %}
<start_of_turn>{{ role }}
{{ text | trim }}<end_of_turn>
{% endmacro %}
{% for message in messages %}
{% if message.content == '' %}{% continue %}{% endif %}
{{ turn('model' if message['role'] == 'assistant' else message['role'], message['content']) }}
{%- if message.last is defined %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<start_of_turn>model
{% endif %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

USER = {"role": "user", "content": " Grüße, 你好 <b>&</b> 👍 "}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "three": [USER, {"role": "assistant", "content": "Yes.  "}, {"role": "user", "content": "So?", "name": None}],
    "system": [{"role": "system", "content": "Be brief.\n"}, USER],
    "tools": [
        USER,
        {
            "role": "assistant",
            "content": "",
            "reasoning": "hm",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": [1, None, "é"]}}}],
        },
        {"role": "user", "content": "ok", "last": True},
        {"role": "assistant", "content": "end"},
    ],
    "order": [USER, USER],
    "no content": [{"role": "user"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]}],
    "empty": [],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Ünïcode <&>", "parameters": {}}}]


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)


def same(transformers_tokenizer: Any, source: str, chat: list[dict[str, Any]], **options: Any) -> str | None:
    """The text, equal to that of transformers; None when both refuse."""
    try:
        theirs = transformers_tokenizer.apply_chat_template(chat, chat_template=source, tokenize=False, **options)
    except Exception:
        theirs = None
    keywords = {
        key: options.pop(key) for key in ("tools", "add_generation_prompt", "continue_final_message") if key in options
    }
    try:
        ours = ChatTemplate(source).render(chat, **keywords, variables=TOKENS | options)
    except InvalidRequest:
        ours = None
    assert ours == theirs
    return ours


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_equals_transformers(transformers_tokenizer: Any, template: str, chat: str, tools: Any, prompt: bool) -> None:
    text = same(transformers_tokenizer, TEMPLATES[template], CHATS[chat], tools=tools, add_generation_prompt=prompt)
    assert (text is not None) or chat in ("order", "system", "no content", "parts", "empty")


@pytest.mark.parametrize("template", TEMPLATES)
def test_variables_equal_transformers(transformers_tokenizer: Any, template: str) -> None:
    options = {"enable_thinking": False, "date_string": "1 Jan 2024", "bos_token": "[B]", "add_generation_prompt": True}
    assert same(transformers_tokenizer, TEMPLATES[template], [USER], **options)


@pytest.mark.parametrize("last", ["I think", "I think  \n", [{"type": "text", "text": "Part "}], "", None, []])
@pytest.mark.parametrize("template", TEMPLATES)
def test_continuing_the_final_message_equals_transformers(
    transformers_tokenizer: Any, template: str, last: Any
) -> None:
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": last}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    text = same(transformers_tokenizer, TEMPLATES[template], chat, **options)
    if isinstance(last, str) and last:
        assert text is not None
        assert text.endswith("I think" if template in ("llama3", "gemma") else last)


def test_a_final_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="leaves out the last message"):
        ChatTemplate("{{ messages[0].content }}").render(
            [USER, {"role": "assistant", "content": "x"}],
            continue_final_message=True,
            add_generation_prompt=False,
            variables={},
        )


def test_continuing_and_opening_a_message_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="only one"):
        ChatTemplate(CHATML).render([USER], continue_final_message=True, variables={})


def test_the_templates_own_message_reaches_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as refused:
        ChatTemplate(MISTRAL).render([USER, USER], variables=TOKENS)
    assert refused.value.param == "messages"


def test_bad_syntax_is_named_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"line 2.*--chat-template"):
        ChatTemplate("ok\n{% endfor %}")


def test_the_date_is_todays() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}").render([USER], variables={})
    assert abs(int(text) - datetime.now().year) <= 1


def test_the_callers_messages_stay_as_they_are() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    ChatTemplate("{{ messages[0].content[0].text }}").render(
        chat, continue_final_message=True, add_generation_prompt=False, variables={}
    )
    assert chat == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% for i in range(9999) %}{{ f(n) if i == 9998 }}{% endfor %}{% endmacro %}{{ f(0) }}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ (messages | map('attr', '__class__') | list)[0].__mro__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].role }}",
        "{{ messages | nofilter if false else undefined_function() }}",
        "{{ messages[0].content + 1 }}",
        "{% include 'other' %}",
        "{{ lipsum(1) }}",
    ],
)
def test_hostile_and_failing_templates_give_an_error(source: str) -> None:
    with pytest.raises((InvalidRequest, ConfigError)):
        ChatTemplate(source).render([USER], variables={})


def test_messages_nested_beyond_all_measure_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        ChatTemplate("{{ messages[0].content }}").render([{**USER, "tool_calls": deep}], variables={})


def test_the_loop_budget_is_per_rendering() -> None:
    template = ChatTemplate("{% for a in range(380) %}{% for b in range(380) %}{% endfor %}{% endfor %}done")
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(template.render([USER], variables={}))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts.append(template.render([USER], variables={}))
    assert texts == ["done"] * 3
