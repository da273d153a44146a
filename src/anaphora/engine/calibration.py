"""Calibrates a loaded model: one pass over the built-in text, layer by layer (storage/calibration.py).

What comes out is kept in the model cache by the digest of the weights: the next start need not compute it, and has the
same bits whatever its threads, so that blocks in tiers still match.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from anaphora.engine.models.load import LoadedModel
from anaphora.engine.sources.cache import cache_root
from anaphora.engine.tokenizer import Tokenizer
from anaphora.geometry.model import ModelGeometry
from anaphora.storage.calibration import Calibration, Calibrator
from anaphora.storage.calibration_text import TEXT

logger = logging.getLogger(__name__)


def calibration_of(
    loaded: LoadedModel, tokenizer: Tokenizer, geometry: ModelGeometry, device: torch.device
) -> Calibration:
    """From the cache, or computed and kept there. State changes: one small file.

    Raises AnaphoraError, naming the layer, when the model makes keys or values that are not finite.
    """
    path = cache_root() / "calibrations" / f"{loaded.weights_digest}-{tokenizer.digest}.bin"
    found = _read(path)
    if found is None:
        found = calibrate(loaded, tokenizer, geometry, device)
        _write(path, found)
    return found


@torch.inference_mode()
def calibrate(loaded: LoadedModel, tokenizer: Tokenizer, geometry: ModelGeometry, device: torch.device) -> Calibration:
    """Compute it. Raises AnaphoraError, naming the layer, for keys or values that are not finite."""
    calibrator = Calibrator(
        tokenizer.encode(TEXT), geometry.max_position, len(geometry.layers), geometry.layers[0].kv_heads
    )
    loaded.hidden(calibrator.token_ids.to(device), calibrator.positions.to(device), calibrator)
    return calibrator.result()


def _read(path: Path) -> Calibration | None:
    try:
        return Calibration.from_bytes(path.read_bytes())
    except OSError:
        return None


def _write(path: Path, calibration: Calibration) -> None:
    """Whole or not at all; where the cache cannot be written, the next start computes it again."""
    work = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work.write_bytes(calibration.to_bytes())
        work.replace(path)
    except OSError as error:
        logger.warning("the calibration could not be kept in %s (%s)", path.parent, error)
