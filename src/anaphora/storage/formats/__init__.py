"""Stored forms of keys and values, by name."""

from __future__ import annotations

import torch

from anaphora.geometry.kv_dtype import KEYS, VALUES
from anaphora.storage.formats.base import Format
from anaphora.storage.formats.nibbles import Nibbles, NibblesWithWide
from anaphora.storage.formats.plain import Plain
from anaphora.storage.formats.scaled import Scaled

FORMATS: dict[str, Format] = {
    each.size.name: each
    for each in (
        Plain(KEYS["fp32"], torch.float32),
        Plain(KEYS["bf16"], torch.bfloat16),
        Plain(KEYS["fp16"], torch.float16),
        Scaled(KEYS["fp8_e4m3"], torch.float8_e4m3fn, 448.0),
        Scaled(KEYS["int8"], torch.int8, 127.0),
        NibblesWithWide(KEYS["int4"]),
        Nibbles(VALUES["int4"]),
    )
}
