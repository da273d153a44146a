"""Stored forms of keys and values, by name."""

from __future__ import annotations

import torch

from anaphora.storage.formats.base import Format
from anaphora.storage.formats.plain import Plain

FORMATS: dict[str, Format] = {
    each.size.name: each
    for each in (Plain("fp32", torch.float32), Plain("bf16", torch.bfloat16), Plain("fp16", torch.float16))
}
