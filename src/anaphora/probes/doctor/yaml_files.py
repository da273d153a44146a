"""YAML: a vLLM config file, a compose or Kubernetes file that starts engines, a LiteLLM list of models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from anaphora.errors import ConfigError
from anaphora.probes.doctor.credentials import check_openai_base, check_stored_key
from anaphora.probes.doctor.engine_line import (
    Launch,
    Option,
    Word,
    canonical,
    engine_of_image,
    published,
    read_launch,
    read_options,
    words_of,
)
from anaphora.probes.doctor.engine_options import table_of
from anaphora.probes.doctor.source import Source

_VLLM_KEYS = {"model", "max-model-len", "gpu-memory-utilization", "max-num-seqs", "tensor-parallel-size", "dtype",
              "enable-prefix-caching", "block-size", "swap-space", "served-model-name", "kv-cache-dtype"}  # fmt: skip
"""Two of these at the top make a vLLM config file."""


def read_yaml(source: Source) -> None:
    """State changes: value, where, kind, launches, findings. Raises ConfigError for what is no YAML."""
    try:
        documents = list(yaml.compose_all(source.text, Loader=yaml.SafeLoader))
        source.value = [yaml.SafeLoader("").construct_document(node) for node in documents if node is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"line {mark.line + 1}: " if mark is not None else ""
        raise ConfigError(f"{source.path} is not YAML: {at}{getattr(error, 'problem', error)}") from None
    for node in documents:
        if isinstance(node, yaml.MappingNode):
            _read_document(source, node)


def _read_document(source: Source, node: yaml.MappingNode) -> None:
    top = {_text(key): value for key, value in node.value}
    if "model_list" in top:
        source.kind = "LiteLLM config"
        _litellm(source, top["model_list"])
    elif len({canonical(key) for key in top} & _VLLM_KEYS) >= 2 and "services" not in top:
        source.kind = "vLLM config"
        source.launches.append(_vllm_config(source, node))
    else:
        source.kind = "compose file" if "services" in top else "YAML"
        for mapping in _mappings(node):
            launch = _container(source, mapping)
            if launch is not None:
                source.launches.append(launch)


def _vllm_config(source: Source, node: yaml.MappingNode) -> Launch:
    launch = Launch("vllm")
    seen: set[str] = set()
    for key, value in node.value:
        name, text, line = canonical(_text(key)), _text(value), key.start_mark.line + 1
        if name in seen:
            source.say("file.twice", line, key=_text(key))
        seen.add(name)
        if name == "model-tag":
            launch.model = text
            continue
        if text.lower() == "null" or (isinstance(value, yaml.ScalarNode) and not value.value):
            edit = source.edit(line, source.lines[line - 1], "", safe=True) if text.lower() == "null" else None
            if name not in table_of("vllm").removed:
                source.say("vllm.null", line, edit=edit, key=_text(key))
                continue
        whole = source.lines[line - 1] if value.end_mark.line == key.start_mark.line else None
        if text.lower() == "false":
            name, text = f"no-{name}", ""
        launch.options.append(Option(name, text or None, line, _text(key), whole))
    return launch


def _container(source: Source, node: yaml.MappingNode) -> Launch | None:
    """A service of compose, or a container of Kubernetes."""
    found = {_text(key): value for key, value in node.value}
    image = _text(found["image"]) if "image" in found else ""
    engine, version = engine_of_image(image)
    words = [word for key in ("entrypoint", "command", "args") if key in found for word in _words(source, found[key])]
    if not words and engine is None:
        return None
    launch = read_launch(words, source.lines) if words else None
    if launch is None and engine is not None:
        launch = Launch(engine, line=node.start_mark.line + 1)
        read_options(launch, words, source.lines)
    if launch is None:
        return None
    launch.contained, launch.version = bool(image), version
    ports = [published(_text(item)) for item in _items(found.get("ports"))]
    launch.ports = tuple(port for port in ports if port)
    return launch


def _words(source: Source, node: yaml.Node) -> list[Word]:
    """Words of a command given as a text (of one or more lines) or as a list."""
    if isinstance(node, yaml.SequenceNode):
        found: list[Word] = []
        for item in node.value:
            if isinstance(item, yaml.ScalarNode):
                raw = source.text[item.start_mark.index : item.end_mark.index]
                line = item.start_mark.line + 1
                many = item.value.startswith("-") and " " in item.value and "=" not in item.value.partition(" ")[0]
                found += words_of(item.value, line) if many else [Word(item.value, raw, line)]
        return found
    if not isinstance(node, yaml.ScalarNode):
        return []
    block = node.style in ("|", ">")
    first = node.start_mark.line + (2 if block else 1)
    lines = source.lines[first - 1 : node.end_mark.line + (0 if block else 1)]
    if not block and lines:
        lines[0] = lines[0][node.start_mark.column :].strip("\"'")
        lines[-1] = lines[-1].rstrip("\"'")
    return [word for offset, line in enumerate(lines) for word in words_of(line.rstrip("\\ "), first + offset)]


def _litellm(source: Source, node: yaml.Node) -> None:
    for item in _items(node):
        for mapping in _mappings(item):
            found = {_text(key): (value, key.start_mark.line + 1) for key, value in mapping.value}
            model = _text(found["model"][0]) if "model" in found else ""
            if "api_base" in found and model.startswith(("openai/", "hosted_vllm/", "text-completion-openai/")):
                value, line = found["api_base"]
                check_openai_base(source, line, "LiteLLM", "api_base", _text(value))
                if "api_key" not in found and model.startswith("openai/"):
                    source.say("litellm.no-key", line)
            if "api_key" in found:
                value, line = found["api_key"]
                check_stored_key(source, line, "api_key", _text(value))


def _mappings(node: yaml.Node) -> Iterator[yaml.MappingNode]:
    if isinstance(node, yaml.MappingNode):
        yield node
        for _, value in node.value:
            yield from _mappings(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _mappings(item)


def _items(node: yaml.Node | None) -> list[Any]:
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _text(node: yaml.Node) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""
