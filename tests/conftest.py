"""Fixtures for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from anaphora.engine.sources import resolve_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct (bf16): fetched and converted once, then found in the cache (ANAPHORA_CACHE)."""
    return resolve_model("smollm2-135m").path
