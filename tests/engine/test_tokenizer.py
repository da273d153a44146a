from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from anaphora.engine.tokenizer import Tokenizer
from anaphora.errors import CorruptModel, InvalidRequest, UnsupportedModel

KINDS = ["byte_level", "byte_fallback", "metaspace", "word_piece"]
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces and\n\nlines\t",
    "你好世界。今天天气很好",
    "👍🏽 👩‍👩‍👧 e\u0301 नमस्ते",
    "<|bos|>hi<|eos|> <s>hi</s> <tool>x",
    "the dog's café",
]

MakeFolder = Callable[..., Path]
Pair = tuple[Tokenizer, Any]


def with_transformers(folder: Path) -> Pair:
    """Our tokenizer and the one of transformers."""
    from transformers import PreTrainedTokenizerFast

    return Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.fixture(scope="session")
def pairs(small_tokenizers: dict[str, Path]) -> dict[str, Pair]:
    return {kind: with_transformers(folder) for kind, folder in small_tokenizers.items()}


@pytest.fixture(scope="session")
def smollm2_pair(smollm2: Path) -> Pair:
    from transformers import AutoTokenizer

    return Tokenizer.from_folder(smollm2), AutoTokenizer.from_pretrained(str(smollm2))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_equal_transformers(pairs: dict[str, Pair], kind: str, text: str) -> None:
    ours, theirs = pairs[kind]
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.model
@given(
    text=st.text() | st.sampled_from(TEXTS) | st.lists(st.sampled_from(["<|im_start|>", "user\n", " a"])).map("".join)
)
def test_smollm2_ids_and_text_equal_transformers(smollm2_pair: Pair, text: str) -> None:
    ours, theirs = smollm2_pair
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)  # some control characters are lost
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.model
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_smollm2_decodes_any_tokens_as_transformers(smollm2_pair: Pair, ids: list[int]) -> None:
    ours, theirs = smollm2_pair
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "word_piece"])
@settings(max_examples=50)
@given(data=st.data())
def test_any_tokens_decode_as_with_transformers(
    pairs: dict[str, Pair], kind: str, skip: bool, data: st.DataObject
) -> None:
    ours, theirs = pairs[kind]
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 3), max_size=12))
    assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@given(data=st.data())
def test_byte_tokens_decode_as_with_transformers_unless_a_run_is_partly_valid(
    pairs: dict[str, Pair], data: st.DataObject
) -> None:
    ours, theirs = pairs["byte_fallback"]
    words = st.lists(st.integers(259, ours.vocab_size - 1), max_size=2)
    characters = st.text(max_size=3).map(lambda text: [3 + byte for byte in text.encode()])
    invalid = st.lists(st.sampled_from([3 + 0xFF, 3 + 0x80, 3 + 0xC1]), max_size=3).map(lambda run: [*run, 259])
    runs = data.draw(st.lists(words | characters.map(lambda run: [*run, 259]) | invalid, max_size=6))
    ids = [token for run in runs for token in run]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_partly_valid_run_of_byte_tokens_keeps_its_characters(pairs: dict[str, Pair]) -> None:
    ours, theirs = pairs["byte_fallback"]
    ids = [3 + byte for byte in "你".encode() + b"\xff\xe4\xbd"]
    assert ours.decode(ids) == "你\ufffd\ufffd\ufffd"
    assert theirs.decode(ids) == "\ufffd" * 6  # the library gives up on the whole run


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_make_up_the_text(pairs: dict[str, Pair], text: str) -> None:
    ours, _ = pairs["byte_level"]
    assert b"".join(map(ours.token_bytes, ours.encode(text, add_special_tokens=False))) == text.encode()


@pytest.mark.parametrize("text", ["Hello you", "  two  spaces", "你好 👍🏽 café"])
def test_byte_and_space_tokens_make_up_the_text(pairs: dict[str, Pair], text: str) -> None:
    ours, _ = pairs["byte_fallback"]
    assert b"".join(map(ours.token_bytes, ours.encode(text, add_special_tokens=False))) == (" " + text).encode()


def test_bytes_and_spelling_of_single_tokens(pairs: dict[str, Pair]) -> None:
    level, fallback = pairs["byte_level"][0], pairs["byte_fallback"][0]
    assert fallback.token_bytes(3 + 0xE4) == b"\xe4"
    assert fallback.token_text(3 + 0xE4) == "<0xE4>"
    assert fallback.token_bytes(1) == b"<s>"
    (the,) = level.encode(" the", add_special_tokens=False)
    assert level.token_text(the) == "Ġthe"
    assert level.token_bytes(the) == b" the"
    assert sorted(level.token_bytes(i) for i in range(3, 259)) == [bytes([byte]) for byte in range(256)]
    assert level.token_bytes(level.vocab_size) == b""
    assert level.token_text(level.vocab_size) is None
    assert level.token_text(-1) is None


def test_special_tokens_in_the_users_text_are_recognised(pairs: dict[str, Pair]) -> None:
    ours, _ = pairs["byte_level"]
    assert ours.encode("<|end|>", add_special_tokens=False) == [2]


def test_half_a_surrogate_pair_is_refused(pairs: dict[str, Pair]) -> None:
    with pytest.raises(InvalidRequest, match="position 2"):
        pairs["byte_level"][0].encode("ab\ud83d")


def test_other_threads_run_while_a_long_text_is_encoded(pairs: dict[str, Pair]) -> None:
    ours, _ = pairs["byte_level"]
    text, ticks, done = "Hello world " * 50_000, 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0)

    interval, ticker = sys.getswitchinterval(), threading.Thread(target=tick)
    sys.setswitchinterval(1000)  # from now on a thread runs only when another lets it
    try:
        ticker.start()
        before = ticks
        ours.encode(text)
        during = ticks - before
    finally:
        sys.setswitchinterval(interval)
        done.set()
        ticker.join()
    assert during > 10


def plain_bpe(**extra: Any) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "<s>": 2, "</s>": 3, "x": 4}, []))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def test_what_ends_a_sequence(small_tokenizers: dict[str, Path], tokenizer_folder: MakeFolder) -> None:
    def ends(**files: Any) -> frozenset[int]:
        return Tokenizer.from_folder(tokenizer_folder(plain_bpe(), **files)).eos_token_ids

    assert Tokenizer.from_folder(small_tokenizers["byte_level"]).eos_token_ids == {1, 2}
    assert ends() == set()
    assert ends(config={"eos_token_id": 3}) == {3}
    assert ends(config={"text_config": {"eos_token_id": [3, 4]}}) == {3, 4}
    assert ends(config={"eos_token_id": 4}, generation_config={"eos_token_id": [2, 3]}) == {2, 3}
    assert ends(config={"eos_token_id": 0}, generation_config={"eos_token_id": None}) == {0}
    assert ends(special_tokens_map={"eos_token": {"content": "</s>", "lstrip": False}}) == {3}
    assert ends(tokenizer_config={"eos_token": "</s>"}, generation_config={"eos_token_id": 2}) == {2, 3}


@pytest.mark.parametrize("eos", ["a", [None], [[1]], {"a": 1}, 1.5])
def test_an_end_that_is_no_token_id_is_refused(tokenizer_folder: MakeFolder, eos: Any) -> None:
    folder = tokenizer_folder(plain_bpe(), config={"eos_token_id": eos})
    with pytest.raises(CorruptModel, match=r"eos_token_id in .*config\.json"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "config", [{"added_tokens_decoder": [1]}, {"added_tokens_decoder": {"x": {}}}, {"extra_special_tokens": 5}]
)
def test_added_tokens_in_a_wrong_form_are_refused(tokenizer_folder: MakeFolder, config: Any) -> None:
    folder = tokenizer_folder(plain_bpe(), tokenizer_config=config)
    with pytest.raises(CorruptModel, match=r"tokenizer_config\.json have the wrong form"):
        Tokenizer.from_folder(folder)


def test_tokens_named_by_the_configs_are_added(tokenizer_folder: MakeFolder) -> None:
    listed = {"6": {"content": "<new>", "special": False}, "5": {"content": "<|s|>", "special": True}}
    folder = tokenizer_folder(
        plain_bpe(),
        tokenizer_config={
            "added_tokens_decoder": listed,
            "bos_token": "<s>",
            "pad_token": "<pad>",
            "extra_special_tokens": ["<extra>"],
        },
    )
    ours, theirs = with_transformers(folder)
    text = "a<s>b<|s|><new><pad><extra>x"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.vocab_size == len(theirs) == 9
    assert ours.special_token_ids == set(theirs.all_special_ids) | {5}
    assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), skip_special_tokens=True) == "ab<new>x"


@pytest.mark.parametrize(("add", "ids"), [(True, [2, 0]), (False, [0])])
def test_add_bos_token_counts_where_tokenizer_json_says_nothing(
    tokenizer_folder: MakeFolder, add: bool, ids: list[int]
) -> None:
    config = {"bos_token": "<s>", "add_bos_token": add}
    assert Tokenizer.from_folder(tokenizer_folder(plain_bpe(), tokenizer_config=config)).encode("a") == ids


def test_truncation_and_padding_of_the_file_are_off(tokenizer_folder: MakeFolder) -> None:
    backend = plain_bpe()
    backend.enable_truncation(2)
    backend.enable_padding(length=4)
    ours = Tokenizer.from_folder(tokenizer_folder(backend))
    assert ours.encode("aba") == [0, 1, 0]
    assert ours.encode("a") == [0]


def test_the_digest_changes_with_what_decides_the_ids(tokenizer_folder: MakeFolder) -> None:
    def digest(backend: tokenizers.Tokenizer, **config: Any) -> str:
        return Tokenizer.from_folder(tokenizer_folder(backend, tokenizer_config=config)).digest

    lower = plain_bpe()
    lower.normalizer = tokenizers.normalizers.Lowercase()
    variants = [
        digest(plain_bpe()),
        digest(lower),
        digest(plain_bpe(), bos_token="<s>"),
        digest(plain_bpe(), bos_token="<s>", add_bos_token=True),
        digest(plain_bpe(), pad_token="<pad>"),
    ]
    assert len(set(variants)) == len(variants)
    assert re.fullmatch(r"[0-9a-f]{64}", variants[0])
    assert digest(plain_bpe(), chat_template="x") == variants[0]


def test_without_tokenizer_json_transformers_converts(tokenizer_folder: MakeFolder) -> None:
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {
        "he": 256,
        "<|endoftext|>": 257,
    }
    folder = tokenizer_folder(
        None,
        vocab=vocabulary,
        config={"model_type": "gpt2", "eos_token_id": 257},
        tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"},
    )
    (folder / "merges.txt").write_text("#version: 0.2\nh e\n", encoding="utf-8")
    ours = Tokenizer.from_folder(folder)
    assert ours.encode("he h")[0] == 256
    assert ours.decode(ours.encode("he 你")) == "he 你"
    assert ours.eos_token_ids == {257}


def test_nothing_to_make_a_tokenizer_of(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_file_is_named(tokenizer_folder: MakeFolder, name: str, content: str) -> None:
    folder = tokenizer_folder(plain_bpe())
    (folder / name).write_text(content)
    with pytest.raises(CorruptModel, match=re.escape(name)):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("decoder", [decoders.CTC(), decoders.BPEDecoder(), decoders.Strip(" ", 0, 1)])
def test_a_decoder_that_cannot_be_streamed_is_refused(tokenizer_folder: MakeFolder, decoder: Any) -> None:
    backend = plain_bpe()
    backend.decoder = decoder
    with pytest.raises(UnsupportedModel, match="byte-level"):
        Tokenizer.from_folder(tokenizer_folder(backend))


def test_an_added_token_decodes_as_the_library_does(tokenizer_folder: MakeFolder) -> None:
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<｜begin▁of▁text｜>"), AddedToken("éé"), AddedToken("a b")])
    ours = Tokenizer.from_folder(tokenizer_folder(backend))
    for ids in ([256], [257], [258], [257, 65, 256, 258]):
        assert ours.decode(ids, skip_special_tokens=False) == backend.decode(ids, skip_special_tokens=False)
    assert ours.token_bytes(257) == "éé".encode()


def test_importing_it_does_not_import_transformers_or_torch(small_tokenizers: dict[str, Path]) -> None:
    code = (
        "import sys, pathlib; from anaphora.engine.tokenizer import Tokenizer;"
        "Tokenizer.from_folder(pathlib.Path(sys.argv[1]));"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(small_tokenizers["byte_level"])]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.model
def test_smollm2_chat_equals_transformers(smollm2_pair: Pair) -> None:
    ours, theirs = smollm2_pair
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "你好 👍🏽 <|im_end|>"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "And now?"},
    ]
    for messages in (chat, chat[1:2]):
        for prompt in (True, False):
            options: dict[str, Any] = {"add_generation_prompt": prompt}
            assert ours.render_chat(messages, **options) == theirs.apply_chat_template(
                messages, tokenize=False, **options
            )
            expected = theirs.apply_chat_template(messages, return_dict=False, **options)
            assert ours.encode_chat(messages, **options) == expected
    assert ours.eos_token_ids == {2}
    assert ours.bos_token == "<|im_start|>"
