from __future__ import annotations
from pathlib import Path
from anaphora.engine.model_cache import Progress
def fetch_from_hub(name: str, progress: Progress, *, force: bool, verify: bool) -> Path:
    raise NotImplementedError
