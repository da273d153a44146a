"""Models of the Hugging Face hub, kept in the hub client's own cache, where other programs find them too."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

from anaphora.engine.sources.cache import DISK_FULL, Progress, sha256_file
from anaphora.engine.sources.folder import check_model_folder
from anaphora.errors import AnaphoraError, ConfigError, CorruptModel, DownloadError, ModelNotFound, UnsupportedModel

_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_UNWANTED = ["*/*", "consolidated*"]
"""Subfolders hold other formats (onnx, the original release); consolidated* repeats the weights under other names."""


def fetch_from_hub(name: str, progress: Progress, *, force: bool = False, verify: bool = False) -> Path:
    """The snapshot folder of repository `name`, fetched as far as it is not there yet.

    Without a network a snapshot that is whole is used as it is. `force` fetches every file again; `verify` hashes what
    is there against the names of its blobs, and fetches again what does not match. Honours HF_TOKEN, HF_ENDPOINT,
    HF_HOME and HF_HUB_OFFLINE. Raises ModelNotFound (unknown, private or gated), UnsupportedModel (no safetensors),
    CorruptModel, ConfigError (the cache), DownloadError.
    """
    folder = _snapshot(name, progress, force=force)
    if verify and not force:
        for damaged in [path for path in sorted(folder.iterdir()) if not _blob_is_whole(path, progress)]:
            damaged.resolve().unlink()
            damaged.unlink()
            folder = _snapshot(name, progress, force=False)
    if not any(folder.glob("*.safetensors")):
        raise UnsupportedModel(
            f"{name} has no *.safetensors on the hub. Choose a repository that has them, or download one "
            "of its .gguf files and give the path of that file."
        )
    try:
        check_model_folder(folder)
    except CorruptModel as error:
        raise CorruptModel(f"{error} (anaphora pull {name} --force fetches it again)") from error
    return folder


def _snapshot(name: str, progress: Progress, *, force: bool) -> Path:
    from huggingface_hub import snapshot_download

    progress(f"looking up {name}", 0, None)
    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                force_download=force,
                tqdm_class=_bar(f"downloading {name}", progress),
            )
        )
    except Exception as error:
        # The client's network errors are those of httpx or of a fork of it, by version: whatever it is, it failed.
        raise _explained(name, error) from error


def _explained(name: str, error: Exception) -> AnaphoraError:
    from huggingface_hub import errors as hub

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if isinstance(error, hub.GatedRepoError):
        return ModelNotFound(
            f"{name} is gated. Accept its licence at {endpoint}/{name}, then set HF_TOKEN to a token of that account."
        )
    if isinstance(error, hub.RepositoryNotFoundError | hub.HFValidationError):
        return ModelNotFound(
            f"There is no model {name} at {endpoint}, or it is private. Check the spelling (org/name); "
            "for a private one set HF_TOKEN. For a local folder give its path, beginning with ./ or /."
        )
    full = isinstance(error, OSError) and error.errno in DISK_FULL
    if isinstance(error, PermissionError):
        return ConfigError(f"The hub's cache cannot be written ({error}). Set HF_HOME to a folder you can write to.")
    advice = (
        "Free some space, or set HF_HOME to a folder on a larger disk."
        if full
        else "Check the network and its proxy, HF_TOKEN and HF_ENDPOINT, or give a local model folder or .gguf file."
    )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return DownloadError(f"{name} could not be fetched from {endpoint}: {reason.rstrip('.')}. {advice}")


def _bar(stage: str, progress: Progress) -> type[Any]:
    """A silent tqdm that hands the bytes of all files together to `progress`."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    lock = threading.Lock()

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            # Some versions keep a second bar for bytes on the wire, beside the one for bytes on the disk.
            self.counts = options.get("unit") == "B" and options.get("desc") != "Downloading bytes"
            self.seen = 0
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            if self.counts:
                with lock:
                    self.seen += int(n or 0)
                    progress(stage, self.seen, int(self.total) if self.total else None)

    return Bar


def _blob_is_whole(link: Path, progress: Progress) -> bool:
    """Blobs are named by their content: SHA-256 for large files, git's SHA-1 for the others."""
    blob = link.resolve()
    if blob == link or not blob.is_file():
        return blob.is_file()
    if len(blob.name) == 64:
        return sha256_file(blob, "verifying", progress) == blob.name
    content = blob.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == blob.name
