"""A model folder -> what executes its steps, by whichever of the ways fits.

compact, native     a DecoderSpec recorded as a native program: a step is one call
compact, torch      the same spec, layer by layer
transformers        any other decoder, layer by layer; attention is native or torch
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from anaphora import native
from anaphora.engine.attention import Attend, TorchAttention
from anaphora.engine.backend import NUMERICS, Backend
from anaphora.engine.config import Implementation
from anaphora.engine.models.checkpoint import Checkpoint
from anaphora.engine.models.compact import load_compact_decoder, streamed_hidden
from anaphora.engine.models.native_decoder import NativeDecoder, NativeExecutor
from anaphora.engine.models.protocol import Decoder
from anaphora.engine.models.spec import decoder_spec
from anaphora.engine.models.weights import WeightReader
from anaphora.engine.native_attention import NativeAttention, NativeStorage
from anaphora.engine.runner import LayerwiseExecutor, StepExecutor
from anaphora.errors import ConfigError, UnsupportedModel
from anaphora.geometry.model import ModelGeometry
from anaphora.storage.paged import PagedStorage

Hidden = Callable[[Tensor, Tensor, Attend], Tensor]
"""See Decoder.forward."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    decoder: Decoder | NativeDecoder
    weights_digest: str
    """Hexadecimal: equal only for equal weights, config, dtype and way, hence for equal keys and values."""
    implementation: Literal["compact", "transformers"]
    backend: Backend
    hidden: Hidden
    """Layer by layer, whatever runs the steps: where a pass is to be looked into. Holds one layer's weights more."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if isinstance(self.decoder, NativeDecoder) else self.decoder.device

    def executor(self, storage: PagedStorage) -> StepExecutor:
        """What runs the model's steps over a storage; one at a time."""
        if self.backend == "torch":
            assert not isinstance(self.decoder, NativeDecoder)
            return LayerwiseExecutor(self.decoder, TorchAttention(storage))
        seen = NativeStorage(native_module(), storage)
        if isinstance(self.decoder, NativeDecoder):
            return NativeExecutor(self.decoder, seen)
        return LayerwiseExecutor(self.decoder, NativeAttention(seen))


def native_module() -> ModuleType:
    """Raises ConfigError when there is none."""
    module = native.load()
    if module is None:
        raise ConfigError(f"{native.missing()}. Or use --backend torch")
    return module


def load_model(
    folder: Path,
    config: Mapping[str, Any],
    geometry: ModelGeometry,
    *,
    dtype: torch.dtype,
    device: torch.device,
    implementation: Implementation = "auto",
    backend: Backend = "torch",
    max_model_len: int | None = None,
) -> LoadedModel:
    """Load the weights of `folder` as `dtype` on `device`; auto = compact where the model has a spec.

    `config` is the folder's config.json, `max_model_len` the longest sequence that will run (None = the model's
    own context); it matters for dynamic and LongRoPE scaling only.

    Raises CorruptModel, naming file and tensor, for damaged, missing or impossible weights, and UnsupportedModel,
    with what to do, for quantised or pickled weights and for models that the asked way cannot run.
    """
    checkpoint = Checkpoint(folder, config)
    spec = None if implementation == "transformers" else decoder_spec(config, geometry, max_model_len)
    if spec is None and implementation == "compact":
        raise UnsupportedModel(
            f"the compact decoder does not know {geometry.architecture} (model_type {geometry.model_type!r}); "
            "leave --implementation at auto"
        )
    with ThreadPoolExecutor(1, thread_name_prefix="weights-digest") as pool:
        files_digest = pool.submit(checkpoint.digest)
        if spec is not None:
            decoder: Decoder | NativeDecoder
            if backend == "native":
                decoder = NativeDecoder(native_module(), spec, WeightReader(checkpoint, spec, dtype, device))
                hidden: Hidden = partial(streamed_hidden, checkpoint, spec)
            else:
                compact = load_compact_decoder(checkpoint, spec, dtype, device)
                decoder, hidden = compact, compact.forward
            positions = repr(spec)
        else:
            from anaphora.engine.models.transformers_decoder import load_transformers_decoder

            checkpoint.check_finite()
            other = load_transformers_decoder(folder, config, geometry, dtype, device, max_model_len=max_model_len)
            decoder, hidden, positions = other, other.forward, repr(other.scaled_for)
    way: Literal["compact", "transformers"] = "transformers" if spec is None else "compact"
    facts = [
        files_digest.result(),
        json.dumps(config, sort_keys=True),
        str(dtype),
        way,
        f"{backend}/{NUMERICS[backend]}",
        positions,
    ]
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
    return LoadedModel(decoder, digest, way, backend, hidden)
