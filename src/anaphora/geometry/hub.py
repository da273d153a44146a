"""A model of the Hugging Face Hub by its config.json and the headers of its safetensors files: weights stay there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from anaphora.errors import CorruptModel, DownloadError, ModelNotFound
from anaphora.geometry.fields import parse_config
from anaphora.geometry.safetensors import StoredWeights, add_up, header_length, total

_TIMEOUT = httpx.Timeout(20.0)
_CONNECTIONS = 8
_FIRST_BYTES = 1 << 16
"""Most headers are shorter, so that one request reads length and header."""


def fetch(
    model_id: str, revision: str = "main", endpoint: str | None = None
) -> tuple[Mapping[str, Any], StoredWeights | None]:
    """(config, what the headers add up to or None without safetensors files).

    Reads HF_ENDPOINT and HF_TOKEN. Raises ModelNotFound, DownloadError and CorruptModel.
    """
    base = (endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(follow_redirects=True, timeout=_TIMEOUT, headers=headers) as client:
        files = _Files(client, f"{base}/{model_id}/resolve/{revision}", model_id)
        raw = files.get("config.json")
        if raw is None:
            raise ModelNotFound(
                f"{base} has no config.json of {model_id!r} at {revision!r}. Check the id (org/name); "
                "a GGUF-only repository has none: download the file and give its path"
            )
        config = parse_config(raw.decode("utf-8", errors="replace"), f"config.json of {model_id}")
        names = files.weight_files()
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            parts = list(pool.map(files.weights, names))
    stored = total(parts)
    return config, stored if stored.bytes else None


class _Files:
    """The files of one model at one revision."""

    def __init__(self, client: httpx.Client, base: str, model_id: str) -> None:
        self._client, self._base, self._model = client, base, model_id

    def get(self, name: str, byte_range: tuple[int, int] | None = None) -> bytes | None:
        """A file or some of its bytes; None when it is not there. Raises DownloadError, ModelNotFound (no access)."""
        headers = {"Range": f"bytes={byte_range[0]}-{byte_range[1]}"} if byte_range else {}
        try:
            with self._client.stream("GET", f"{self._base}/{name}", headers=headers) as reply:
                if reply.status_code == 404:
                    return None
                if reply.status_code in (401, 403):
                    raise ModelNotFound(
                        f"{self._model}: the server answers {reply.status_code}: the model is private, gated or not "
                        "there. Accept its licence and set HF_TOKEN, or check the id"
                    )
                reply.raise_for_status()
                if byte_range is None:
                    return reply.read()
                return _first(reply, byte_range)
        except httpx.HTTPError as error:
            raise DownloadError(
                f"{name} of {self._model} could not be fetched ({error}). Check the network, "
                "or give a local folder or config.json"
            ) from None

    def weight_files(self) -> list[str]:
        """Names of the safetensors files, from the index or the single file's usual name."""
        index = self.get("model.safetensors.index.json")
        if index is None:
            return ["model.safetensors"]
        try:
            return sorted(set(json.loads(index)["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CorruptModel(f"model.safetensors.index.json of {self._model} is broken") from None

    def weights(self, name: str) -> StoredWeights:
        """What one file's header adds up to: nothing where the file is not there."""
        first = self.get(name, (0, _FIRST_BYTES - 1))
        if first is None:
            return StoredWeights(0, 0)
        label = f"{name} of {self._model}"
        length = header_length(first, label)
        header = first[8 : 8 + length]
        if len(header) < length:
            header = self.get(name, (8, 7 + length)) or b""
        return add_up(header, label)


def _first(reply: httpx.Response, byte_range: tuple[int, int]) -> bytes:
    """The bytes asked for, and not one chunk more where a server ignores the range."""
    start, end = byte_range
    skip = start if reply.status_code == 200 else 0
    wanted, found = end - start + 1, bytearray()
    for chunk in reply.iter_bytes():
        found += chunk
        if len(found) >= skip + wanted:
            break
    return bytes(found[skip : skip + wanted])
