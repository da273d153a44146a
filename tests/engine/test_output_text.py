from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.engine.output_text import OutputText, TextDelta
from anaphora.engine.params import SamplingParams, TokenLogprob
from anaphora.engine.tokenizer import Tokenizer

KINDS = [
    "byte_level",
    "byte_fallback",
    "metaspace",
    "word_piece",
    pytest.param("smollm2", marks=pytest.mark.model),
]
SNIPPETS = [
    "Hello world! ",
    "你好世界。今天天气很好",
    "👩‍👩‍👧",
    "👍🏽",
    "e\u0301o\u0308",
    "नमस्ते",
    "\n\n",
    " the quick",
    "naïve café",
    "🇩🇪",
    "ab" * 4,
    "\ufffd",
    "STOP",
]
STOPS = [
    "STOP",
    "S",
    "world",
    "llo w",
    "好世",
    "。今",
    "👍",
    "👩‍👩",
    "\u0301",
    "abab",
    "aba",
    "\n\n",
    "\n",
    "\ufffd",
    " ",
    "zzz",
    "café",
]


@pytest.fixture(scope="session")
def all_tokenizers(small_tokenizers: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: Tokenizer.from_folder(folder) for kind, folder in small_tokenizers.items()}


@pytest.fixture(scope="session")
def tokenizer(all_tokenizers: dict[str, Tokenizer], request: pytest.FixtureRequest) -> Tokenizer:
    kind: str = request.param
    if kind not in all_tokenizers:
        all_tokenizers[kind] = Tokenizer.from_folder(request.getfixturevalue(kind))
    return all_tokenizers[kind]


each_kind = pytest.mark.parametrize("tokenizer", KINDS, indirect=True)


@st.composite
def token_lists(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Tokens of real text, cut anywhere, mixed with any tokens at all (special ones, lone bytes, unknown ids)."""
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            text = "".join(draw(st.lists(st.sampled_from(SNIPPETS), max_size=4)))
            encoded = tokenizer.encode(text, add_special_tokens=False)
            ids += encoded[draw(st.integers(0, 2)) : len(encoded) - draw(st.integers(0, 2))]
        else:
            ids += draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=4))
    return ids


def unfinished_character(data: bytes) -> bytes:
    """The last bytes that some more bytes would make a character."""
    for tail in (data[-n:] for n in (3, 2, 1) if len(data) >= n):
        for missing in range(1, 4):
            for more in itertools.product(b"\x80\x90\xa0", repeat=missing):
                if len((tail + bytes(more)).decode(errors="replace").replace("\ufffd", "xx")) == 1:
                    return tail
    return b""


def unfinished(tokenizer: Tokenizer, ids: Sequence[int], skip: bool = True) -> bytes:
    shown = [i for i in ids if tokenizer.token_text(i) is not None and not (skip and i in tokenizer.special_token_ids)]
    return unfinished_character(b"".join(tokenizer.piece(i, first=False) for i in shown))


def full_text(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), skip: bool = True) -> str:
    """The definition: decode everything, take the prompt's part and an unfinished character away."""
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    marks = len(unfinished(tokenizer, ids, skip).decode("utf-8", tokenizer.utf8_decoder().errors))
    return whole[len(tokenizer.decode(prompt, skip_special_tokens=skip)) : len(whole) - marks]


def spans(tokenizer: Tokenizer, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Where each token's text starts and ends, the character counted whole that it continues or leaves unfinished."""
    found = []
    for n, token_id in enumerate(ids):
        start = len(full_text(tokenizer, ids[:n]))
        before, after = unfinished(tokenizer, ids[:n]), unfinished(tokenizer, ids[: n + 1])
        visible = tokenizer.is_visible(token_id, skip_special_tokens=True)
        if visible and not 0x80 <= tokenizer.piece(token_id, first=False)[0] < 0xC0:
            start += len(before.decode("utf-8", tokenizer.utf8_decoder().errors))  # that character was given up
        found.append((start, len(full_text(tokenizer, ids[: n + 1])) + bool(after)))
    return found


def run(
    tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), **params: Any
) -> tuple[OutputText, list[TextDelta]]:
    """One delta per pushed token, and the last one of flush."""
    output = OutputText(tokenizer, SamplingParams(**params), prompt)
    deltas: list[TextDelta] = []
    for token_id in ids:
        deltas.append(output.push(token_id))
        if deltas[-1].finished_by is not None:
            break
    return output, [*deltas, output.flush()]


def joined(deltas: Sequence[TextDelta]) -> TextDelta:
    return sum(deltas, TextDelta())


@each_kind
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_character_comes_as_soon_as_it_is_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids, prompt = data.draw(token_lists(tokenizer)), tokenizer.encode(data.draw(st.sampled_from(["", "Hello", "你"])))
    skip = data.draw(st.booleans())
    _, deltas = run(tokenizer, ids, prompt, ignore_eos=True, skip_special_tokens=skip)
    for n in range(len(ids) + 1):
        assert joined(deltas[:n]).text == full_text(tokenizer, ids[:n], prompt, skip)
    assert deltas[-1].text == ""
    assert joined(deltas).token_ids == tuple(ids)


@each_kind
def test_real_text_comes_out_as_it_went_in(tokenizer: Tokenizer) -> None:
    text = "".join(SNIPPETS)
    ids = tokenizer.encode(text, add_special_tokens=False)
    _, deltas = run(tokenizer, ids)
    assert joined(deltas).text == tokenizer.decode(ids)
    if tokenizer.decode(ids) == text:
        assert all("\ufffd" not in d.text or "\ufffd" in text for d in deltas)


def first_stop(text: str, stops: Sequence[str], after: int) -> tuple[str, int] | None:
    """The stop string completed first after position `after`, longest first, and where it ends."""
    for end in range(after + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return stop, end
    return None


def could_begin(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that a stop string goes on from."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@each_kind
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_stop_strings(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(token_lists(tokenizer))
    stops = tuple(data.draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=3)))
    include, min_tokens = data.draw(st.booleans()), data.draw(st.sampled_from([0, 0, 1, 3]))
    output, deltas = run(
        tokenizer, ids, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, ignore_eos=True
    )
    texts = [full_text(tokenizer, ids[:n]) for n in range(len(ids) + 1)]
    found = first_stop(texts[-1], stops, len(texts[min(min_tokens, len(ids))]))
    cut = len(texts[-1])
    if found is not None:
        cut = found[1] if include else found[1] - len(found[0])
    total = joined(deltas)
    assert total.text == texts[-1][:cut]
    assert total.finished_by == (found and found[0])
    last = len(deltas) - 1
    assert output.num_output_tokens == last
    if found is None:
        assert total.token_ids == tuple(ids)
    else:
        assert len(texts[last - 1]) < found[1] <= len(texts[last])
        assert total.token_ids == tuple(ids[: len(total.token_ids)])
        for n, (start, end) in enumerate(spans(tokenizer, ids[:last])):
            in_stop_text_or_after_it = start >= cut and end > cut
            assert in_stop_text_or_after_it == (n >= len(total.token_ids))
    for n in range(1, last if found else last + 1):
        held = 0 if include else could_begin(texts[n], stops)
        assert joined(deltas[:n]).text == texts[n][: len(texts[n]) - held]


@each_kind
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_tokens_come_with_the_last_of_their_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(token_lists(tokenizer))
    _, deltas = run(tokenizer, ids, stop=("STOP", "zzz", "好世界好", "abababc"), min_tokens=10_000, ignore_eos=True)
    ends = [end for _, end in spans(tokenizer, ids)]
    for n in range(len(ids)):
        so_far = joined(deltas[: n + 1])
        held = next((k for k in range(n + 1) if ends[k] > len(so_far.text)), n + 1)
        assert so_far.token_ids == tuple(ids[:held])


def one_by_one(all_tokenizers: dict[str, Tokenizer], text: str) -> tuple[Tokenizer, list[int]]:
    """`text` as byte tokens, the hardest way to cut it."""
    tokenizer = all_tokenizers["byte_fallback"]
    return tokenizer, [3 + byte for byte in text.encode()]


def test_a_character_is_held_until_its_last_byte(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, ids = one_by_one(all_tokenizers, "é你👍")
    _, deltas = run(tokenizer, ids)
    assert [d.text for d in deltas] == ["", "é", "", "", "你", "", "", "", "👍", ""]
    assert [len(d.token_ids) for d in deltas] == [0, 2, 0, 0, 3, 0, 0, 0, 4, 0]


def test_a_character_cut_off_at_the_end_is_dropped(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, ids = one_by_one(all_tokenizers, "a你")
    _, deltas = run(tokenizer, ids[:-1])
    assert [d.text for d in deltas] == ["a", "", "", ""]
    assert joined(deltas).token_ids == tuple(ids[:-1])


@pytest.mark.parametrize(
    ("kind", "data", "texts"),
    [
        ("byte_fallback", b"\xff", ["\ufffd"]),
        ("byte_fallback", b"\x80a", ["\ufffd", "a"]),
        ("byte_fallback", b"\xe4\xbda", ["", "", "\ufffd\ufffda"]),
        ("byte_fallback", b"\xed\xa0\x80", ["", "\ufffd\ufffd", "\ufffd"]),
        ("byte_level", b"\xff", ["\ufffd"]),
        ("byte_level", b"\xe4\xbda", ["", "", "\ufffda"]),
        ("byte_level", b"\xf0\x9f\x91\xf0\x9f\x91\x8d", ["", "", "", "\ufffd", "", "", "👍"]),
    ],
)
def test_bytes_that_cannot_become_a_character_do_not_wait(
    all_tokenizers: dict[str, Tokenizer], kind: str, data: bytes, texts: list[str]
) -> None:
    tokenizer = all_tokenizers[kind]
    of_byte = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    ids = [of_byte[bytes([byte])] for byte in data]
    _, deltas = run(tokenizer, ids)
    assert [d.text for d in deltas] == [*texts, ""]
    assert joined(deltas).text == tokenizer.decode(ids)


@pytest.mark.parametrize(("prompt", "text"), [("", "Hello you"), ("I said", " Hello you")])
def test_the_first_word_keeps_its_space_after_a_prompt(
    all_tokenizers: dict[str, Tokenizer], prompt: str, text: str
) -> None:
    for kind in ("byte_fallback", "metaspace"):
        tokenizer = all_tokenizers[kind]
        ids = tokenizer.encode("Hello you", add_special_tokens=False)
        _, deltas = run(tokenizer, ids, [1, *(tokenizer.encode(prompt, add_special_tokens=False) if prompt else [])])
        assert joined(deltas).text == text


def test_the_stop_string_that_is_complete_first_wins_however_the_text_is_cut(
    all_tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer, bytewise = one_by_one(all_tokenizers, "xabcd")
    whole = tokenizer.encode("xabcd", add_special_tokens=False)
    for stops, text, by in [
        (("bc", "abcd"), "xa", "bc"),
        (("c", "abc"), "x", "abc"),
        (("abcd", "b"), "xa", "b"),
        (("cd", "abcx"), "xab", "cd"),
    ]:
        for ids in (bytewise, whole):
            _, deltas = run(tokenizer, ids, stop=stops)
            assert (joined(deltas).text.strip(), joined(deltas).finished_by) == (text, by)


def test_a_stop_string_across_tokens_never_leaks(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, ids = one_by_one(all_tokenizers, "ab\nUser: 你")
    _, deltas = run(tokenizer, ids, stop=("\nUser:",))
    assert [d.text for d in deltas] == ["a", "b", *[""] * 7]
    assert joined(deltas).token_ids == tuple(ids[:2])
    _, deltas = run(tokenizer, one_by_one(all_tokenizers, "a\nUsed")[1], stop=("\nUser:",))
    assert [d.text for d in deltas] == ["a", "", "", "", "", "\nUsed", ""]


def test_a_stop_string_in_the_prompt_does_not_count(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, ids = one_by_one(all_tokenizers, "OPx")
    _, deltas = run(tokenizer, ids, one_by_one(all_tokenizers, "ST")[1], stop=("STOP",))
    assert joined(deltas) == TextDelta("OPx", tuple(ids))


def test_the_token_after_an_unfinished_character_is_stop_text_alone(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, ids = one_by_one(all_tokenizers, "你A")
    _, deltas = run(tokenizer, [*ids[:2], ids[3]], stop=("A",))
    assert joined(deltas) == TextDelta("\ufffd\ufffd", tuple(ids[:2]), finished_by="A")


def test_min_tokens_delays_stop_strings(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, ids = one_by_one(all_tokenizers, "abxabyab")
    for min_tokens, text in [(0, ""), (1, ""), (2, "abx"), (5, "abxaby"), (8, "abxabyab")]:
        _, deltas = run(tokenizer, ids, stop=("ab",), min_tokens=min_tokens)
        assert joined(deltas).text == text


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("params", "ends"),
    [({}, True), ({"ignore_eos": True}, False), ({"min_tokens": 3}, True), ({"min_tokens": 4}, False)],
)
def test_eos_ends_without_text(
    all_tokenizers: dict[str, Tokenizer], params: dict[str, Any], ends: bool, skip: bool
) -> None:
    tokenizer, ids = one_by_one(all_tokenizers, "hi!x")
    ids[3:3] = [2]
    output, deltas = run(tokenizer, ids, skip_special_tokens=skip, **params)
    total = joined(deltas)
    if ends:
        assert total == TextDelta("hi!", tuple(ids[:3]), finished_by=2)
        assert output.num_output_tokens == 4
    else:
        assert total == TextDelta("hi!x" if skip else "hi!</s>x", tuple(ids))


def test_stop_tokens(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, ids = one_by_one(all_tokenizers, "hi!x")
    _, deltas = run(tokenizer, ids, stop_token_ids=(ids[2],))
    assert joined(deltas) == TextDelta("hi", tuple(ids[:2]), finished_by=ids[2])
    _, deltas = run(tokenizer, ids, stop_token_ids=(ids[2],), include_stop_str_in_output=True)
    assert joined(deltas) == TextDelta("hi!", tuple(ids[:3]), finished_by=ids[2])
    for skip, text in [(True, "hi"), (False, "hi</s>")]:
        _, deltas = run(tokenizer, [*ids[:2], 2], include_stop_str_in_output=True, skip_special_tokens=skip)
        assert joined(deltas) == TextDelta(text, (*ids[:2], 2), finished_by=2)


def test_ending_gives_held_text_but_no_unfinished_character(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, ids = one_by_one(all_tokenizers, "a ST你")
    _, deltas = run(tokenizer, [*ids[:-1], 2], stop=("STOP",))
    assert [d.text for d in deltas] == ["a", " ", "", "", "", "", "ST", ""]
    assert joined(deltas) == TextDelta("a ST", tuple(ids[:-1]), finished_by=2)


def test_flush_after_the_end_gives_nothing(all_tokenizers: dict[str, Tokenizer]) -> None:
    output, deltas = run(all_tokenizers["byte_fallback"], [2])
    assert deltas[-1] == output.flush() == TextDelta()


def test_logprobs_come_with_their_tokens(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, ids = one_by_one(all_tokenizers, "a你STx")
    output = OutputText(tokenizer, SamplingParams(stop=("STOP",), logprobs=1), [])
    tokens = [TokenLogprob(i, -math.pi, ((i, -math.pi),)) for i in ids]
    deltas = [*map(output.push, tokens), output.flush()]
    assert [d.logprobs for d in deltas] == [
        (tokens[0],), (), (), tuple(tokens[1:4]), (), (), tuple(tokens[4:]), ()
    ]  # fmt: skip
    assert all(tuple(t.token_id for t in d.logprobs) == d.token_ids for d in deltas)


def test_long_outputs_and_long_stop_strings_keep_little(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, (a,) = one_by_one(all_tokenizers, "a")
    output = OutputText(tokenizer, SamplingParams(stop=("a" * 50 + "b", "a" * 30 + "c")), [])
    texts = [output.push(a).text for _ in range(30_000)]
    assert texts == [""] * 50 + ["a"] * 29_950
    assert output.flush().text == "a" * 50


def test_a_huge_stop_string_costs_only_what_the_text_matches_of_it(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, (a,) = one_by_one(all_tokenizers, "a")
    stop = "a" * 1_000_000
    tracemalloc.start()
    output = OutputText(tokenizer, SamplingParams(stop=(stop,)), [])
    for _ in range(1000):
        output.push(a)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    assert output.flush().text == "a" * 1000
