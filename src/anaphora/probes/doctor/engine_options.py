"""Options of vLLM, SGLang and llama-server against the tables of what they really have."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from typing import Any

from anaphora.probes.doctor.engine_line import Launch, Option
from anaphora.probes.doctor.engine_rules import RULES
from anaphora.probes.doctor.sayings import load_table
from anaphora.probes.doctor.source import Source


@dataclass(frozen=True, slots=True)
class Table:
    """What one engine knows."""

    title: str
    version: str
    options: frozenset[str]
    removed: dict[str, dict[str, Any]]
    misleading: dict[str, dict[str, Any]]
    choices: dict[str, list[str]]
    aliases: dict[str, str]
    negatable: bool
    """Every option has a --no- form."""

    def knows(self, name: str) -> bool:
        """Options may be abbreviated as long as one alone begins so, and hold a path after a dot (vLLM's JSON)."""
        bare = name.partition(".")[0]
        if self.negatable and bare.startswith("no-"):
            bare = bare.removeprefix("no-")
        if bare in self.options or (self.negatable and bare.startswith("-O")):
            return True
        return not name.startswith("-") and sum(option.startswith(bare) for option in self.options) == 1


@cache
def table_of(engine: str) -> Table:
    """By the name of a Launch's engine."""
    found = load_table(f"{engine}.toml")
    return Table(
        found["title"],
        found["version"],
        frozenset(found["options"].split()),
        found["removed"],
        found["misleading"],
        found["choices"],
        found.get("aliases", {}),
        found["negatable"],
    )


def check_launch(source: Source, launch: Launch) -> None:
    """State changes: findings of the source; short names of the launch's options become long ones."""
    table = table_of(launch.engine)
    for index, option in enumerate(launch.options):
        _check_option(source, launch, table, option)
        if option.name in table.aliases:
            launch.options[index] = Option(
                table.aliases[option.name], option.value, option.line, option.flag, option.whole
            )
    for rule in RULES[launch.engine]:
        rule(source, launch)


def _check_option(source: Source, launch: Launch, table: Table, option: Option) -> None:
    name = table.aliases.get(option.name, option.name)
    if name in table.removed:
        _removed(source, launch, table, option)
    elif not table.knows(name):
        near = difflib.get_close_matches(name, table.options, n=1, cutoff=0.7)
        right = dashed(option, near[0]) if near else ""
        source.say(
            "option.unknown" if near else "option.unknown-alone",
            option.line,
            edit=source.edit(option.line, option.flag, right) if near else None,
            option=option.flag,
            engine=table.title,
            version=table.version,
            right=right,
        )
    elif option.name in table.misleading:
        source.say("option.misleading", option.line, option=option.flag, say=table.misleading[option.name]["say"])
    choices = table.choices.get(name)
    if choices and option.value is not None and option.value.lower() not in choices:
        shown = ", ".join(choices[:10])
        source.say(
            "option.value", option.line, option=option.flag, value=option.value, choices=shown, engine=table.title
        )


def _removed(source: Source, launch: Launch, table: Table, option: Option) -> None:
    entry = table.removed[option.name]
    since = entry.get("since")
    if launch.version and since and _number(launch.version) < _number(since):
        return
    put = entry.get("put")
    edit = None
    if put == "":
        edit = source.edit(option.line, option.whole or "", "", safe=True) if not _in_list(source, option) else None
    elif put:
        edit = source.edit(option.line, option.flag, dashed(option, put), safe=entry.get("safe", True))
    source.say(
        "option.removed",
        option.line,
        edit=edit,
        option=option.flag,
        engine=table.title,
        version=table.version,
        since=f", gone since {since}" if since else "",
        say=entry["say"],
        act=f"Replace it by {dashed(option, put)}" if put else "Drop it" if put == "" else "Write that instead",
    )


def dashed(option: Option, name: str) -> str:
    """A name written as the option is: with dashes in front, or as a key of a file."""
    if option.flag.startswith("--"):
        return name if name.startswith("-") else f"--{name}"
    return name if "_" not in option.flag else name.replace("-", "_")


def _in_list(source: Source, option: Option) -> bool:
    """Whether taking it away would leave a comma or dash of a list behind."""
    line = source.lines[option.line - 1].strip()
    return "[" in line or line.startswith('"') or (line.startswith("- ") and line[2:].strip("\"'") != option.whole)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
