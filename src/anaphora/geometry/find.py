"""One way from whatever a user calls a model to its geometry: a path, a name of the catalogue, a Hub id."""

from __future__ import annotations

from pathlib import Path

from anaphora.errors import ModelNotFound
from anaphora.geometry.model import ModelGeometry


def find_geometry(name: str, *, assume_full_attention: bool = False, hub: bool = False) -> ModelGeometry:
    """A folder, config.json or .gguf file that exists; else the catalogue; else, when allowed, the Hub.

    Raises ModelNotFound (nearest names), UnsupportedModel, CorruptModel and, with `hub`, DownloadError.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return ModelGeometry.from_gguf(path)
    if path.exists():
        files = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
        if files:
            return ModelGeometry.from_gguf(files[0])
        return ModelGeometry.from_config(path, assume_full_attention=assume_full_attention)
    if path.suffix == ".json":
        raise ModelNotFound(f"{name} is not there; give a config.json, a folder that holds one, or a model's name")
    try:
        return ModelGeometry.from_catalog(name)
    except ModelNotFound as missing:
        if hub and name.count("/") == 1:
            return ModelGeometry.from_hub(name, assume_full_attention=assume_full_attention)
        if name.count("/") == 1:
            raise ModelNotFound(f"{missing}; --hub asks the Hugging Face Hub for its config") from None
        raise
