"""The catalogue of models that works offline: the facts of a config.json that decide size, in compact TOML.

    [[model]]
    id = "Qwen/Qwen2.5-7B-Instruct"
    aliases = ["qwen2.5:7b"]
    parameters = 7_615_616_512
    parameters_from = "published"      # or "counted": from the model's class, without draft (MTP) layers
    source = "..."                     # where the facts come from
    [model.config]                     # the keys of config.json, with three shorthands:
    layer_types = { runs = "10*(5*sliding_attention full_attention)" }     # a list, by runs
    num_key_value_heads = "null"                                           # JSON's null, which TOML lacks
    ignore = ["model.layers.<0-2,7>.mlp"]                                  # one name per number

More entries, or others in place of ours: `models.toml` in $ANAPHORA_CONFIG_DIR, else in ~/.config/anaphora.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from anaphora.errors import ModelNotFound
from anaphora.geometry.catalog_files import Entry, check_keys, nearest, overlay, packaged_entries, user_entries

USER_FILE = "models.toml"
_FOLDER = Path(__file__).with_name("catalog")
PARAMETERS_FROM = ("published", "counted")

_KEYS: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "aliases": list,
    "parameters": int,
    "parameters_from": str,
    "source": str,
    "config": dict,
}
_RUN = re.compile(r"(\d+)\*\(|(?:(\d+)\*)?([^\s()*]+)|(\))")
_RANGE = re.compile(r"<([\d,-]+)>")


@dataclass(frozen=True)
class CatalogModel:
    """One model's facts."""

    id: str
    """As on the Hugging Face Hub."""
    aliases: tuple[str, ...]
    """Other models with the same facts (chat and base variants) and short names."""
    config: Mapping[str, Any]
    """The keys of config.json that decide KV geometry and parameter count; ModelGeometry.from_config reads it."""
    parameters: int | None
    """None where neither published nor countable."""
    parameters_from: str | None
    source: str
    family: str

    @cached_property
    def dtype(self) -> str | None:
        """The checkpoint's own dtype (of what is not quantised); None where the config does not say."""
        for part in (self.config, self._text):
            value = part.get("dtype") or part.get("torch_dtype")
            if value:
                return str(value).removeprefix("torch.")
        return None

    @cached_property
    def quantization(self) -> str | None:
        """The checkpoint's quantisation method, or None."""
        found = self.config.get("quantization_config") or self._text.get("quantization_config")
        if not found:
            return None
        return str(found.get("quant_algo") or found.get("quant_method"))

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures") or self._text.get("architectures") or ["unknown"]
        return str(names[0])

    @property
    def _text(self) -> Mapping[str, Any]:
        part: Mapping[str, Any] = self.config.get("text_config") or self.config.get("language_config") or {}
        return part


def models() -> tuple[CatalogModel, ...]:
    """Every model, the user's first. Raises ConfigError (file and line) for a broken user file."""
    return tuple(_model(entry) for entry in _entries())


def find_model(name: str) -> CatalogModel:
    """The model of that id, alias, or id without its organisation; case does not matter.

    Raises ModelNotFound with the nearest names, ConfigError for a broken user file.
    """
    entries = _entries()
    wanted = name.strip().casefold()
    for entry in entries:
        if any(wanted == alias.casefold() for alias in entry.names):
            return _model(entry)
    bare = [entry for entry in entries if any(wanted == alias.casefold().rpartition("/")[2] for alias in entry.names)]
    if len(bare) == 1:
        return _model(bare[0])
    every = [alias for entry in entries for alias in entry.names]
    near = [alias for entry in bare for alias in entry.names if alias.casefold().endswith(wanted)]
    near = near or nearest(wanted.rpartition("/")[2], every)
    hint = f"nearest names: {', '.join(near)}. " if near else ""
    raise ModelNotFound(
        f"the catalogue has no model {name!r}; {hint}"
        "`anaphora models` lists all; a config.json or a folder that holds one works too"
    )


def search_models(text: str) -> tuple[CatalogModel, ...]:
    """The models whose id, aliases, architecture or family hold every word of `text`; all for an empty text."""
    words = text.casefold().split()
    found = []
    for model in models():
        place = " ".join((model.id, *model.aliases, model.architecture, model.family)).casefold()
        if all(word in place for word in words):
            found.append(model)
    return tuple(found)


def _entries() -> tuple[Entry, ...]:
    return overlay(packaged_entries(_FOLDER, "model"), user_entries(USER_FILE, "model"))


def _model(entry: Entry) -> CatalogModel:
    table = entry.table()
    check_keys(entry, table, _KEYS)
    if not table.get("config"):
        raise entry.fail(f"{entry.names[0]} needs a table [model.config] with the keys of its config.json")
    origin = table.get("parameters_from")
    if origin is not None and origin not in PARAMETERS_FROM:
        raise entry.fail(f"parameters_from is one of {', '.join(PARAMETERS_FROM)}", "parameters_from")
    if table.get("parameters", 1) <= 0:
        raise entry.fail("parameters is a count above 0", "parameters")
    try:
        config = expand(table["config"])
    except ValueError as error:
        raise entry.fail(str(error)) from None
    return CatalogModel(
        id=entry.names[0],
        aliases=entry.names[1:],
        config=config,
        parameters=table.get("parameters"),
        parameters_from=origin,
        source=table.get("source", entry.file),
        family=entry.family,
    )


def expand(value: Any) -> Any:
    """A value with its shorthands written out. Raises ValueError for one that cannot be read."""
    if isinstance(value, dict):
        if value.keys() == {"runs"}:
            return expand_runs(value["runs"])
        return {key: expand(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [item for inner in value for item in (_names(inner) if isinstance(inner, str) else [expand(inner)])]
    return None if value == "null" else value


def expand_runs(text: str) -> list[Any]:
    """ "2*full 2*(full shared)" -> full full full shared full shared; whole numbers become int."""
    levels: list[tuple[int, list[Any]]] = [(1, [])]
    rest = text
    while rest := rest.lstrip():
        found = _RUN.match(rest)
        if found is None:
            raise ValueError(f"runs = {text!r} cannot be read at {rest!r}")
        opens, times, item, closes = found.groups()
        if opens:
            levels.append((int(opens), []))
        elif closes:
            if len(levels) == 1:
                raise ValueError(f"runs = {text!r} closes a bracket that was never opened")
            count, inner = levels.pop()
            levels[-1][1].extend(inner * count)
        else:
            levels[-1][1].extend([int(item) if re.fullmatch(r"-?\d+", item) else item] * int(times or 1))
        rest = rest[found.end() :]
    if len(levels) > 1:
        raise ValueError(f"runs = {text!r} leaves a bracket open")
    return levels[0][1]


def _names(text: str) -> list[str]:
    """ "layers.<0-2,7>.mlp" -> one name per number."""
    found = _RANGE.search(text)
    if found is None:
        return [text]
    numbers: list[int] = []
    for part in found[1].split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return [f"{text[: found.start()]}{number}{text[found.end() :]}" for number in numbers]
