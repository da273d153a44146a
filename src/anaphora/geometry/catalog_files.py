"""Catalogue files: `[[model]]` or `[[device]]` tables in TOML, ours and the user's.

One entry is one table with its own heading, so an entry can be parsed alone: looking up one model of some
three hundred costs milliseconds, not the half second that parsing all of them takes.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from anaphora.errors import ConfigError

CONFIG_DIR_VARIABLE = "ANAPHORA_CONFIG_DIR"

_HEADING = r"^[ \t]*\[\[[ \t]*{array}[ \t]*\]\][ \t]*(?:#.*)?$"
_ID = re.compile(r'^id = "([^"]+)"$', re.MULTILINE)
_ALIASES = re.compile(r"^aliases = \[([^\]]*)\]$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Entry:
    """One table of a catalogue file: its names are known, the rest is parsed when asked for."""

    file: str
    line: int
    """Where its heading stands, counted from 1."""
    text: str
    array: str
    names: tuple[str, ...]
    """The id, then the aliases."""
    family: str = ""
    """The file's stem."""

    def table(self) -> dict[str, Any]:
        table: dict[str, Any] = tomllib.loads(self.text)[self.array][0]
        return table

    def fail(self, problem: str, key: str | None = None) -> ConfigError:
        """The error to raise about this entry; it names the file and the line of `key`, or of the heading."""
        line = self.line
        for offset, text in enumerate(self.text.splitlines()):
            if key and re.match(rf'[ \t]*"?{re.escape(key)}"?[ \t]*=', text):
                line += offset
                break
        return ConfigError(f"{self.file}, line {line}: {problem}")


def packaged_entries(folder: Path, array: str) -> tuple[Entry, ...]:
    """Every entry of the TOML files we ship. `id` and `aliases` stand first and are written plainly there."""
    found: list[Entry] = []
    for path in sorted(folder.glob("*.toml")):
        for line, text in _split(path.read_text(encoding="utf-8"), array):
            identity = _ID.search(text)
            aliases = _ALIASES.search(text)
            if identity is None:
                raise ConfigError(f"{path.name}, line {line}: the entry has no id; reinstall anaphora")
            names = (identity[1], *re.findall(r'"([^"]+)"', aliases[1] if aliases else ""))
            found.append(Entry(path.name, line, text, array, names, path.stem))
    return tuple(found)


def user_entries(filename: str, array: str) -> tuple[Entry, ...]:
    """The entries of the user's own file, or none. Raises ConfigError with file and line."""
    path = config_dir() / filename
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; mend or remove the file") from None
    try:
        whole = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # its message names line and column
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    tables = whole.pop(array, [])
    parts = list(_split(text, array))
    if whole or not isinstance(tables, list) or len(tables) != len(parts):
        key = next(iter(whole), array)
        line = next((n for n, row in enumerate(text.splitlines(), 1) if re.match(rf'\W*"?{re.escape(key)}\b', row)), 1)
        raise ConfigError(f"{path}, line {line}: write each entry under a heading of its own, [[{array}]]")
    return tuple(
        Entry(str(path), line, part, array, _user_names(Entry(str(path), line, part, array, ()), table), "yours")
        for (line, part), table in zip(parts, tables, strict=True)
    )


def _user_names(entry: Entry, table: Mapping[str, Any]) -> tuple[str, ...]:
    name, aliases = table.get("id"), table.get("aliases", [])
    if not isinstance(name, str) or not name.strip():
        raise entry.fail('the entry needs an id, for example id = "my/model"', "id")
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise entry.fail("aliases is a list of names", "aliases")
    return (name, *aliases)


def config_dir() -> Path:
    """Where the user's own catalogue files lie."""
    return Path(os.environ.get(CONFIG_DIR_VARIABLE) or Path.home() / ".config" / "anaphora")


def overlay(ours: Sequence[Entry], users: Sequence[Entry]) -> tuple[Entry, ...]:
    """The user's entries replace ours of the same id and stand first."""
    replaced = {entry.names[0].casefold() for entry in users}
    return (*users, *(entry for entry in ours if entry.names[0].casefold() not in replaced))


def check_keys(entry: Entry, table: Mapping[str, Any], types: Mapping[str, type | tuple[type, ...]]) -> None:
    """Raise ConfigError for a key that is unknown or of the wrong type."""
    for key, value in table.items():
        if key not in types:
            near = difflib.get_close_matches(key, types, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(types)}"
            raise entry.fail(f"no such key: {key}; {hint}", key)
        if not isinstance(value, types[key]) or isinstance(value, bool):
            raise entry.fail(f"{key} is {value!r}, which is not of its type", key)


def nearest(name: str, names: Iterable[str], limit: int = 5) -> list[str]:
    """Names that contain `name`, then names spelled like it."""
    wanted = name.casefold()
    spelled = {candidate.casefold(): candidate for candidate in names}
    inside = sorted((folded for folded in spelled if wanted and wanted in folded), key=len)
    close = difflib.get_close_matches(wanted, spelled, n=limit, cutoff=0.5)
    return [spelled[folded] for folded in dict.fromkeys((*inside[:limit], *close))][:limit]


def _split(text: str, array: str) -> Iterable[tuple[int, str]]:
    """(line of the heading, the entry's text) of each entry."""
    starts = [match.start() for match in re.finditer(_HEADING.format(array=re.escape(array)), text, re.MULTILINE)]
    for start, end in pairwise([*starts, len(text)]):
        yield text.count("\n", 0, start) + 1, text[start:end]
