"""Messages of engines, as they print them: recognised, with their numbers, and a change that follows from them."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from anaphora.probes.doctor.logs import read_log, recognisers
from anaphora.probes.doctor.sayings import sayings

MESSAGES = tomllib.loads((Path(__file__).parents[2] / "data" / "doctor_logs.toml").read_text(encoding="utf-8"))
SOUND = MESSAGES.pop("sound")["message"]


@pytest.mark.parametrize("code", MESSAGES)
def test_a_message_is_explained_with_its_numbers(code: str) -> None:
    found = read_log(MESSAGES[code]["message"], "server.log")
    assert [finding.code for finding in found] == [code]
    told = f"{found[0].what} {found[0].fix}"
    for number in MESSAGES[code]["told"]:
        assert number in told, told


def test_every_recogniser_has_words_and_a_message_here() -> None:
    known = {one.code for one in recognisers()}
    assert known == set(MESSAGES)
    assert known <= set(sayings())


def test_a_sound_log_has_no_finding() -> None:
    assert read_log(SOUND, "server.log") == []


def test_repetition_is_counted_and_the_line_is_the_first() -> None:
    found = read_log("start\n" + "KV cache pool is full. Retract requests.\n" * 5, "server.log")
    assert [(finding.line, "5 times" in finding.evidence) for finding in found] == [(2, True)]


def test_every_finding_of_the_code_has_words_and_every_word_a_use() -> None:
    """findings.toml and the code name the same codes."""
    folder = Path(str(files("anaphora.probes.doctor")))
    text = "\n".join(
        path.read_text() for path in [*folder.glob("*.py"), folder.parents[1] / "cli" / "doctor_memory.py"]
    )
    used = set(re.findall(r'"([a-z]+\.(?!json|toml)[a-z-]+)"', text)) | {one.code for one in recognisers()}
    words = set(sayings())
    assert words <= used, words - used
    missing = {code for code in used if code.partition(".")[0] in {word.partition(".")[0] for word in words}} - words
    assert not missing
