"""Formats by name, and by the first lines of a trace."""

from __future__ import annotations

from collections.abc import Callable

from anaphora.errors import ConfigError, InputError
from anaphora.replay.readers.anaphora import AnaphoraLog
from anaphora.replay.readers.azure import Azure
from anaphora.replay.readers.bailian import Bailian
from anaphora.replay.readers.base import Reader
from anaphora.replay.readers.chats import Chats, Tokenize
from anaphora.replay.readers.mooncake import Mooncake

FORMATS: dict[str, Callable[[Tokenize | None], Reader]] = {
    "mooncake": lambda _: Mooncake(),
    "bailian": lambda _: Bailian(),
    "chats": Chats,
    "anaphora": lambda _: AnaphoraLog(),
    "azure": lambda _: Azure(),
}


def make_reader(name: str, tokenize: Tokenize | None = None) -> Reader:
    """A reader for one file. Raises ConfigError."""
    if name not in FORMATS:
        raise ConfigError(f"no trace format is called {name!r}; choose one of {', '.join(FORMATS)}")
    return FORMATS[name](tokenize)


def recognise(lines: list[str], where: str, tokenize: Tokenize | None = None) -> Reader:
    """The reader of the format that one of a file's first lines shows. Raises InputError."""
    readers = [make(tokenize) for make in FORMATS.values()]
    for line in lines:
        for reader in readers:
            if reader.recognises(line):
                return reader
    if not any(line.strip() for line in lines):
        raise InputError(f"{where} is empty; give a trace with at least one request")
    raise InputError(
        f"{where} is in no format that is known: its first line is {lines[0].strip()[:60]!r}. "
        f"Say which one it is with --format {'|'.join(FORMATS)}"
    )
