"""What each type of KV cache that the engine has would hold in the same memory."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.errors import AnaphoraError
from anaphora.planning.plan import Question, answer


@dataclass(frozen=True, slots=True)
class KVType:
    """One type, all else unchanged."""

    name: str
    block_bytes: int
    tokens: int
    requests: int
    """Of the asked context, at once."""
    chosen: bool


def kv_types(question: Question) -> list[KVType]:
    """The chosen type, the model's own and smaller ones; those that the model's widths do not allow are left out."""
    chosen = question.settings.kv_cache_dtype
    found = []
    for name in dict.fromkeys(("auto", chosen, *question.engine.half_kv)):
        try:
            then = answer(question.changed(kv_cache_dtype=name))
        except AnaphoraError:
            continue
        capacity = then.capacity
        found.append(KVType(name, capacity.block_bytes, capacity.tokens, then.requests, name == chosen))
    return found
