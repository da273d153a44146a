"""A decoder with a spec, every step of it one native call."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

from anaphora.engine.batch import Batch
from anaphora.engine.models.native_program import Recorder
from anaphora.engine.models.spec import DecoderSpec
from anaphora.engine.models.weights import WeightReader
from anaphora.engine.native_attention import NativeStorage, check
from anaphora.engine.runner import Compute, StepLogits


class NativeDecoder:
    """The recorded model. Its weights are packed while they are read, so that no second copy of them is ever there."""

    def __init__(self, native: ModuleType, spec: DecoderSpec, read: WeightReader) -> None:
        """Raises CorruptModel, naming file and tensor (see Checkpoint.read)."""
        recorder = Recorder(native, spec, read)
        self.program = recorder.record()
        self.weight_bytes = recorder.weight_bytes
        self.vocab_size = spec.vocab_size


class NativeExecutor:
    """See StepExecutor."""

    def __init__(self, decoder: NativeDecoder, storage: NativeStorage) -> None:
        self._decoder = decoder
        self._storage = storage

    def begin(self, batch: Batch) -> Compute:
        step = self._storage.step(batch)
        token_ids, positions = np.array(batch.token_ids, np.int64), np.array(batch.positions, np.int64)
        wanted = np.array(batch.wanted, np.int32)

        def compute() -> StepLogits:
            logits = torch.empty(len(wanted), self._decoder.vocab_size)
            best = np.empty(len(wanted), np.int64)
            self._decoder.program.run(step, token_ids, positions, wanted, logits, best)
            check(step)
            return StepLogits(logits, best)

        return compute
