"""Whether a model folder has what loading needs, checked without reading the weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from anaphora.errors import CorruptModel, ModelNotFound, UnsupportedModel

_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_INDEX = "model.safetensors.index.json"
_CONVERT = (
    "python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{0}')"
    ".save_pretrained('{0}-safetensors')\""
)


def check_model_folder(folder: Path) -> None:
    """Raise unless `folder` holds config.json, every safetensors shard, whole, and a tokenizer.

    Raises ModelNotFound (no model there), UnsupportedModel (pickled weights, an adapter), CorruptModel (a file that is
    missing or cut short). Every message names the file.
    """
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} has no config.json; {_what_it_is(folder)}")
    _json(folder / "config.json")
    for path in _weight_files(folder):
        _check_safetensors(path)
    if not any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS):
        raise CorruptModel(
            f"{folder} has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt). "
            "Copy the tokenizer files of the model into it."
        )


def _what_it_is(folder: Path) -> str:
    if files := sorted(folder.glob("*.gguf")):
        return f"it holds GGUF files. Give one of them: {files[0]}"
    if (folder / "adapter_config.json").is_file():
        return "it holds an adapter, not a model. Merge it into its base model first (peft: merge_and_unload)."
    if (folder / "params.json").is_file():
        return "it is in the original release's format. Take the model in the transformers format."
    return "a model folder holds config.json, *.safetensors and a tokenizer. Is this the right folder?"


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        try:
            names = sorted(set(_json(folder / _INDEX)["weight_map"].values()))
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptModel(f"{folder / _INDEX} has no weight_map. Download it again.") from error
        if missing := [name for name in names if not (folder / str(name)).is_file()]:
            raise CorruptModel(
                f"{folder} lacks {len(missing)} of {len(names)} shards: {', '.join(map(str, missing[:5]))}. "
                "Download the missing files again."
            )
        return [folder / name for name in names]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    if pickles := sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]):
        raise UnsupportedModel(
            f"{folder} has only pickled weights ({pickles[0].name}), which can run any code when they are read. "
            f"If you trust them, convert them once: {_CONVERT.format(folder)} and copy the tokenizer files along."
        )
    raise CorruptModel(f"{folder} has no *.safetensors. Download the weights into it.")


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{path} is not valid JSON ({error}). Download it again.") from error
    if not isinstance(content, dict):
        raise CorruptModel(f"{path} is no JSON object. Download it again.")
    return content


def _check_safetensors(path: Path) -> None:
    """The header says where the last tensor ends; the file must end exactly there.

    Layout: 8 bytes little-endian length N | N bytes JSON {name: {"data_offsets": [begin, end], ..}} | tensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if head == b"version ":
            raise CorruptModel(f"{path} is a Git LFS pointer, not the weights. Run: git lfs pull")
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > size - 8:
            raise CorruptModel(f"{path} is cut short or not a safetensors file ({size:,} bytes). Download it again.")
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            promised = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise CorruptModel(f"{path} has a damaged header. Download it again.") from error
    if promised != size:
        raise CorruptModel(f"{path} has {size:,} bytes where its header needs {promised:,}. Download it again.")
