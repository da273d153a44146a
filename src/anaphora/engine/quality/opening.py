"""One loaded model and the stored forms that are to be compared, all on the same kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anaphora.engine.build import Prepared, Startup, codec_of, load_weights, prepare
from anaphora.engine.config import UserConfig
from anaphora.engine.models.load import LoadedModel
from anaphora.engine.quality.sequences import Subject
from anaphora.engine.sources.resolve import ModelFolder
from anaphora.engine.tokenizer import Tokenizer
from anaphora.errors import ConfigError
from anaphora.geometry.kv_dtype import kv_dtype
from anaphora.storage.calibration import Calibration
from anaphora.storage.codec import Codec

REFERENCE = "bf16"


@dataclass(frozen=True, slots=True)
class Opened:
    """`subjects[0]` is the reference."""

    prepared: Prepared
    loaded: LoadedModel
    tokenizer: Tokenizer
    subjects: tuple[Subject, ...]
    calibration: Calibration | None

    def without_layer(self, subject: Subject, layer: int) -> Subject:
        """The form with one layer left in bf16."""
        dtype = subject.codec.dtype
        codec = Codec(
            replace(dtype, skipped=dtype.skipped | {layer}, plain=kv_dtype(REFERENCE).plain),
            subject.codec.layout,
            self.calibration,
        )
        return replace(subject, name=f"{subject.name} but layer {layer}", codec=codec)


def open_model(folder: ModelFolder, user: UserConfig, names: Sequence[str]) -> Opened:
    """Load `folder` once. `names`: values of --kv-cache-dtype; those of `user` for single layers, keys or values apply.

    Raises ConfigError for unknown names and what else cannot be, and what loading raises. State changes: memory.
    """
    plain = replace(user, kv_cache_dtype=REFERENCE, k_dtype=None, v_dtype=None, kv_cache_dtype_skip_layers="")
    every = [prepare(folder, each) for each in (plain, *(replace(user, kv_cache_dtype=name) for name in names))]
    different = {each.blocks.dtype.name: each for each in every}
    if len(different) < 2:
        raise ConfigError(f"nothing to compare with {REFERENCE}: name another form, for example --kv-dtypes int8,int4")
    first = every[0]
    tokenizer, loaded = load_weights(first, Startup())
    subjects, calibration = [], None
    for name, each in different.items():
        codec, calibration = codec_of(each, loaded, tokenizer, calibration)
        subjects.append(Subject(name, codec, loaded.executor, loaded.device))
    return Opened(first, loaded, tokenizer, tuple(subjects), calibration)
