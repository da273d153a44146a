"""GGUF -> a folder of safetensors and tokenizer, through transformers, with what transformers leaves out put right."""

from __future__ import annotations

import functools
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anaphora.engine.sources.cache import Progress
from anaphora.engine.sources.gguf_rope import rope_scaling
from anaphora.errors import CorruptModel, DownloadError, UnsupportedModel
from anaphora.geometry.gguf_header import GgufHeader, read_gguf_header

CONVERTER_VERSION = 1
"""Raised whenever the same file would convert to something else; part of the cache's key."""

_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How safetensors, written in Rust, reports what went wrong with writing."""

_CONTROL = 3
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<|eom_id|>")
"""Control tokens that end a turn whatever `eos_token_id` says (as llama.cpp's end-of-generation set)."""

_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""`tokenizer.ggml.pre` of vocabularies split at each digit and then by GPT-2's pattern (llama.cpp, llama-vocab.cpp)."""


def convert_gguf(file: Path, work: Path, folder: Path, progress: Progress) -> None:
    """Fill `folder` with `file` as bf16 safetensors, tokenizer, chat template and generation config.

    `work` is an empty scratch folder. Raises CorruptModel, UnsupportedModel, or DownloadError when the disk is full.
    Imports torch and transformers; needs twice the bf16 size in memory at most.
    """
    header = read_gguf_header(file)
    _check_room(file, folder, needed=2 * header.elements + (64 << 20))
    # Alone in a folder of its own: next to a config.json or tokenizer.json transformers would mix the two.
    source = work / "source"
    source.mkdir()
    (source / "model.gguf").symlink_to(file.absolute())
    stage = f"converting {file.name} to safetensors"
    progress(stage, 0, None)
    with _harnessed(progress, stage):
        try:
            _convert(file, source, header, folder)
        except (CorruptModel, MemoryError):
            raise
        except Exception as error:
            # Whatever transformers or safetensors raise: the file is what could not be used, unless the system says so.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            if number := _OS_ERROR.search(str(error)):
                raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UnsupportedModel(
                f"{file} (architecture {header.architecture!r}) cannot be converted: {reason[0].rstrip('.')}. "
                "Use the model's safetensors folder or its hub id instead."
            ) from error


def _check_room(file: Path, folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"Converting {file.name} needs {needed:,} bytes under {folder.parent}, and {free:,} are free. "
            "Free some space, or set ANAPHORA_CACHE to a folder on a larger disk."
        )


def _convert(file: Path, source: Path, header: GgufHeader, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    scaling = rope_scaling(source / "model.gguf", header)
    tokenizer = AutoTokenizer.from_pretrained(str(source), gguf_file="model.gguf")
    _repair_tokenizer(tokenizer, header)
    model, report = AutoModelForCausalLM.from_pretrained(
        str(source),
        gguf_file="model.gguf",
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        # transformers would go on with random numbers in their place.
        raise CorruptModel(f"{file} has no tensor for {', '.join(missing[:5])}. Download it again.")
    _repair_config(model, header)
    if scaling:
        model.config.rope_parameters = model.config.rope_parameters | scaling
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="5GB")


def _repair_tokenizer(tokenizer: Any, header: GgufHeader) -> None:
    from tokenizers import pre_tokenizers

    if header.metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokens = header.metadata.get("tokenizer.ggml.tokens", [])
    if len(tokenizer) > len(tokens):
        raise UnsupportedModel(f"its tokenizer would get {len(tokenizer)} tokens where the file has {len(tokens)}.")


def _repair_config(model: Any, header: GgufHeader) -> None:
    """One config names one eos; a chat model ends its turn with others too."""
    meta = header.metadata
    tokens, kinds = meta.get("tokenizer.ggml.tokens", []), meta.get("tokenizer.ggml.token_type", [])
    ends = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    control = (i for i, kind in enumerate(kinds) if kind == _CONTROL and i < len(tokens))
    ends += [i for i in control if tokens[i] in _END_OF_TURN]
    unique = list(dict.fromkeys(i for i in ends if i is not None))
    model.generation_config.eos_token_id = unique[0] if len(unique) == 1 else unique or None
    model.generation_config._from_model_config = False


@contextmanager
def _harnessed(progress: Progress, stage: str) -> Iterator[None]:
    """transformers' own bars and notes off, its loop over the tensors reported to `progress`, and the file parsed once.

    transformers parses the file anew for config, tokenizer and weights, and the gguf package takes ten seconds for
    the head of a model with 50,000 tokens. Everything is put back at the end.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as loader
    from transformers.utils import logging

    def watched(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        total, done = sum(int(tensor.n_bytes) for tensor in tensors), 0
        for tensor in tensors:
            yield tensor
            done += int(tensor.n_bytes)
            progress(stage, done, total)

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    reader, bar = gguf.GGUFReader, loader.tqdm
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    gguf.GGUFReader, loader.tqdm = functools.cache(reader), watched
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gguf.GGUFReader, loader.tqdm = reader, bar
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
