"""Reads the weights of a model folder: which file holds which tensor, checked, one tensor at a time.

Files are mapped, not read whole: at any time the memory holds what was asked for and one tensor more.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from anaphora.errors import CorruptModel, UnsupportedModel

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_AGAIN = "fetch the model again (anaphora pull)"
_HASH_THREADS = 4


class Checkpoint:
    """The safetensors files of one folder.

    Raises CorruptModel, naming the file, when a shard is missing, cut short or has a damaged header, and
    UnsupportedModel when the folder's weights are quantised or pickled.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        quantization = config.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
            raise UnsupportedModel(
                f"{folder} holds weights quantised with {method}, which cannot run here. Take the model's "
                "unquantised weights, or a GGUF file"
            )
        self.folder = folder
        self.files = self._find_files()
        """Every file with weights, by name."""
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in self.files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    self._file_of[name] = path
                    self._shapes[name] = tuple(file.get_slice(name).get_shape())
        self._check_index()

    @property
    def names(self) -> Sequence[str]:
        return list(self._file_of)

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    def read(self, parts: Sequence[tuple[str, tuple[int, ...]]], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The named tensors, each of the given shape, one below the other (along the first axis), as `dtype`.

        Raises CorruptModel, naming file and tensor, when one is missing, has another shape, or holds NaN or infinity.
        """
        for name, shape in parts:
            path = self._path_of(name)
            if self._shapes[name] != shape:
                raise CorruptModel(
                    f"{path}: tensor {name} has shape {list(self._shapes[name])}, config.json asks for {list(shape)}; "
                    f"weights and config.json do not belong together, {_AGAIN}"
                )
        rows = sum(shape[0] for _, shape in parts)
        whole = torch.empty((rows, *parts[0][1][1:]), dtype=dtype, device=device)
        begin = 0
        for name, shape in parts:
            part = whole[begin : begin + shape[0]]
            with _opened(self._file_of[name]) as file:
                tensor = file.get_tensor(name)
            if not tensor.is_floating_point():
                raise UnsupportedModel(
                    f"{self._file_of[name]}: tensor {name} is {tensor.dtype}, quantised in a way config.json does not "
                    "tell. Take the model's unquantised weights, or a GGUF file"
                )
            part.copy_(tensor)
            self._check_finite(name, part)
            begin += shape[0]
        return whole

    def check_finite(self) -> None:
        """Read every tensor once. Raises CorruptModel, naming file and tensor, at the first NaN or infinity."""
        for path in self.files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118
                    self._check_finite(name, file.get_tensor(name))

    def digest(self) -> str:
        """Hexadecimal BLAKE2b digest of all weights' bytes, whatever the files are called. Releases the GIL."""
        with ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="weights-digest") as pool:
            digests = sorted(pool.map(_digest_file, self.files))
        return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()

    def _find_files(self) -> list[Path]:
        if (self.folder / _SINGLE).is_file():
            return [self.folder / _SINGLE]
        if (self.folder / _INDEX).is_file():
            shards = sorted(set(self._index().values()))
            for shard in shards:
                if not (self.folder / shard).is_file():
                    raise CorruptModel(f"{self.folder / shard} is missing, {_INDEX} names it; {_AGAIN}")
            return [self.folder / shard for shard in shards]
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self.folder.glob(pattern))
        if pickled:
            raise UnsupportedModel(
                f"{self.folder} holds its weights as a pickle ({pickled[0]}), which can run code when it is read. "
                "Take a safetensors version of the model, or save it as one with save_pretrained"
            )
        raise CorruptModel(f"{self.folder} has no {_SINGLE} and no {_INDEX}; {_AGAIN}")

    def _index(self) -> dict[str, str]:
        path = self.folder / _INDEX
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            names = {str(name): str(shard) for name, shard in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptModel(f"{path} is not an index of shards ({error!r}); {_AGAIN}") from error
        for shard in names.values():
            if Path(shard).name != shard:
                raise CorruptModel(f"{path} names a file outside the folder: {shard!r}; {_AGAIN}")
        return names

    def _check_index(self) -> None:
        if self.files == [self.folder / _SINGLE]:
            return
        for name, shard in self._index().items():
            if self._file_of.get(name) != self.folder / shard:
                raise CorruptModel(
                    f"{self.folder / shard}: tensor {name} is missing, {_INDEX} places it there; {_AGAIN}"
                )

    def _path_of(self, name: str) -> Path:
        path = self._file_of.get(name)
        if path is None:
            where = self.files[0] if len(self.files) == 1 else self.folder / _INDEX
            raise CorruptModel(f"{where}: tensor {name} is missing; {_AGAIN}")
        return path

    def _check_finite(self, name: str, tensor: Tensor) -> None:
        # One sum decides in nearly every case: NaN and infinity survive it.
        if not tensor.is_floating_point() or bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all()):
            return
        path = self._file_of[name]
        with _opened(path) as file:
            if bool(file.get_tensor(name).isfinite().all()):
                raise UnsupportedModel(
                    f"{path}: tensor {name} holds values too large for {tensor.dtype}; use --dtype bfloat16 or float32"
                )
        raise CorruptModel(f"{path}: tensor {name} holds NaN or infinite values; {_AGAIN}")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CorruptModel(f"{path} is damaged or cut short ({error}); {_AGAIN}") from error


def _digest_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).digest()
