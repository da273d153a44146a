"""An engine's start as written somewhere: which engine, which options, on which lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_VERSION = re.compile(r":v?(\d+\.\d+(?:\.\d+)?)")
_TOKEN = re.compile(r"(?:'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^\s'\"\\])+")
_ENDS = {"|", "||", "&&", ";", "&", ">", ">>", "2>&1", "2>"}
_IMAGES = (
    ("vllm/vllm-openai", "vllm"),
    ("vllm-openai", "vllm"),
    ("lmsysorg/sglang", "sglang"),
    ("llama.cpp:server", "llama_server"),
    ("llama.cpp:full", "llama_server"),
)


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command."""

    text: str
    """Without quotes."""
    raw: str
    """As it stands in the file."""
    line: int


@dataclass(frozen=True, slots=True)
class Option:
    """One option of an engine."""

    name: str
    """Without dashes in front, words joined by dashes; a short option keeps its dash."""
    value: str | None
    line: int
    flag: str
    """The name as it stands in the file."""
    whole: str | None
    """Name and value as they stand in one line of the file; None where they do not."""


@dataclass(slots=True)
class Launch:
    """One start of an engine."""

    engine: str
    """vllm, sglang or llama_server: the name of its table."""
    options: list[Option] = field(default_factory=list)
    model: str | None = None
    """Where it is no option."""
    version: str | None = None
    """Of the container image."""
    line: int = 1
    contained: bool = False
    """Runs in a container."""
    ports: tuple[tuple[int, int], ...] = ()
    """(published, inside) ports of the container."""

    def get(self, *names: str) -> Option | None:
        """The last option of one of these names: it wins."""
        return next((option for option in reversed(self.options) if option.name in names), None)

    def number(self, *names: str) -> float | None:
        """The value of an option as a number; None where it is not given or is none."""
        option = self.get(*names)
        return None if option is None or option.value is None else to_number(option.value)

    @property
    def model_name(self) -> str | None:
        option = self.get("model", "model-path", "hf-repo")
        return option.value if option and option.value else self.model


def to_number(text: str) -> float | None:
    """A number, also as vLLM takes them: 32k is 32,000, 32K is 32,768."""
    found = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([kmgKMG]?)\s*", text)
    if not found:
        return None
    powers = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    return float(found.group(1)) * powers[found.group(2)]


def engine_of_image(image: str) -> tuple[str | None, str | None]:
    """(engine, version) of a container image; None for what is not known."""
    engine = next((name for sign, name in _IMAGES if sign in image), None)
    version = _VERSION.search(image)
    return engine, version.group(1) if version else None


def words_of(text: str, line: int) -> list[Word]:
    """The words of one line of a shell command."""
    found = []
    for match in _TOKEN.finditer(text):
        raw = match.group()
        if raw.startswith("#"):
            break
        found.append(
            Word(re.sub(r"'([^']*)'|\"((?:\\.|[^\"\\])*)\"", lambda m: m.group(1) or m.group(2) or "", raw), raw, line)
        )
    return found


def commands_in(text: str) -> list[list[Word]]:
    """Commands of a script, each with its continuation lines."""
    commands: list[list[Word]] = []
    current: list[Word] = []
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.rstrip()
        more = stripped.endswith("\\") and not stripped.endswith("\\\\")
        current += words_of(stripped[:-1] if more else stripped, number)
        if not more and current:
            commands.append(current)
            current = []
    return [*commands, current] if current else commands


def read_launch(words: list[Word], text_lines: list[str]) -> Launch | None:
    """The engine that a command starts; None where it starts none."""
    start, launch = _find_start(words)
    if launch is None:
        return None
    launch.line = words[start - 1].line if start else words[0].line
    read_options(launch, words[start:], text_lines)
    return launch


def read_options(launch: Launch, words: list[Word], text_lines: list[str]) -> None:
    """State changes: the launch's options, and its model where that is a bare word."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word.text in _ENDS:
            break
        if not _is_flag(word.text):
            launch.model = launch.model or word.text
            continue
        name, equals, value = word.text.partition("=")
        raw_name = word.raw.partition("=")[0].strip("\"'")
        whole: str | None = word.raw
        given: str | None = value if equals else None
        if not equals and index < len(words) and not _is_flag(words[index].text) and words[index].text not in _ENDS:
            following = words[index]
            given = following.text
            whole = _together(word, following, text_lines)
            index += 1
        launch.options.append(Option(canonical(name), given, word.line, raw_name, whole))


def canonical(name: str) -> str:
    """`--max_model_len` and `max_model_len` -> max-model-len; `-c` stays."""
    if name.startswith("-") and not name.startswith("--"):
        return name
    return name.removeprefix("--").replace("_", "-")


def _is_flag(text: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", text))


def _together(flag: Word, value: Word, lines: list[str]) -> str | None:
    if flag.line != value.line:
        return None
    line = lines[flag.line - 1]
    start = line.find(flag.raw)
    end = line.find(value.raw, start + len(flag.raw))
    return None if start < 0 or end < 0 else line[start : end + len(value.raw)]


def _find_start(words: list[Word]) -> tuple[int, Launch | None]:
    """(index of the first word that belongs to the engine, the launch)."""
    ports: list[tuple[int, int]] = []
    for index, word in enumerate(words):
        text, following = word.text, words[index + 1].text if index + 1 < len(words) else ""
        base = text.rpartition("/")[2]
        if text in ("-p", "--publish") and (port := published(following)):
            ports.append(port)
        elif base == "vllm" and following == "serve":
            return index + 2, Launch("vllm")
        elif text in ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server"):
            return index + 1, Launch("vllm")
        elif text == "sglang.launch_server" or (base == "sglang" and following == "serve"):
            return index + 1 + (following == "serve"), Launch("sglang")
        elif base in ("llama-server", "llama-server.exe"):
            return index + 1, Launch("llama_server")
        elif words[0].text.rpartition("/")[2] in ("docker", "podman", "nerdctl"):
            engine, version = engine_of_image(text)
            rest = words[index + 1 :]
            if engine and not text.startswith("-"):
                inner, launch = _find_start(rest) if rest else (0, None)
                launch = launch or Launch(engine)
                launch.version, launch.contained, launch.ports = version, True, tuple(ports)
                return index + 1 + inner, launch
    return 0, None


def published(text: str) -> tuple[int, int] | None:
    """`8000:8000` or `127.0.0.1:8000:8000/tcp` -> (published, inside)."""
    found = re.search(r"(?:^|:)(\d+):(\d+)(?:/tcp)?$", text.strip())
    return (int(found.group(1)), int(found.group(2))) if found else None
