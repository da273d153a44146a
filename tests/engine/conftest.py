"""Small tokenizers of every kind that language models use, as model folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, the fox runs on.",
    "Hello world! Hello there, how are you today? I am fine, thank you.",
    "you are a helpful assistant; answer in one word, please: yes or no?",
    "naïve café, 你好世界。 今天天气很好 👍",
]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 or Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|bos|>", "<|eos|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("你 好", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 or Mistral: spaces are "▁", unknown characters are bytes, the first space is dropped."""
    metaspace = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE())
    trained.normalizer = metaspace
    trained.train_from_iterator(LINES[:3], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: index for index, name in enumerate(names)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = metaspace
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace() -> Tokenizer:
    """A sentencepiece unigram model, as XGLM."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """As the Chinese GPT-2 models that took BERT's tokenizer."""
    pieces = ["<unk>", "<s>", "</s>", "hello", "##s", "world", ",", ".", "'", "do", "n't", "你", "好", "##lo", "hel"]
    tokenizer = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


MakeFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """Function: writes a tokenizer and the given JSON files (name without ".json" -> content) into a new folder."""

    def make(tokenizer: Tokenizer | None, **files: Any) -> Path:
        folder = tmp_path_factory.mktemp("tokenizer")
        if tokenizer is not None:
            tokenizer.save(str(folder / "tokenizer.json"))
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        return folder

    return make


@pytest.fixture(scope="session")
def small_tokenizers(tokenizer_folder: MakeFolder) -> dict[str, Path]:
    """One folder per kind of decoder."""
    sentencepiece = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return {
        "byte_level": tokenizer_folder(
            byte_level(), tokenizer_config={"bos_token": "<|bos|>", "eos_token": "<|eos|>", "eot_token": "<|end|>"}
        ),
        "byte_fallback": tokenizer_folder(byte_fallback(), tokenizer_config=sentencepiece),
        "metaspace": tokenizer_folder(metaspace(), tokenizer_config=sentencepiece),
        "word_piece": tokenizer_folder(word_piece(), tokenizer_config=sentencepiece),
    }
