"""Attention over paged keys and values: the interface, and the step's context every backend builds from a Batch.

A backend's `begin(batch)` does what all layers share (slot mapping, tables, lengths) once, and returns the
step's `attend`. There are no globals: a decoder gets `attend` as an argument.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from anaphora.engine.batch import Batch


class Attend(Protocol):
    """One step's attention, called once per layer, layers in any order."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write the step's keys and values to their slots, then attend causally over each row's whole context.

        query [T, query_heads, key_dim], key [T, kv_heads, key_dim], value [T, kv_heads, value_dim], all of one
        dtype, positional encoding applied, tokens in the order of the batch's rows; -> [T, query_heads, value_dim].
        Query head h reads KV head h // (query_heads // kv_heads). The layer's window is that of its cache group:
        a query at position p sees keys at p - window + 1 .. p.

            score = softcap * tanh(query . key * scale / softcap)      (without softcap: query . key * scale)
            score += alibi_slopes[head] * (key position - query position)
            weight = exp(score) / (exp(sinks[head]) + sum exp(score))  (without sinks: plain softmax)

        alibi_slopes and sinks: [query_heads]. State changes: the storage.
        """
        ...


class AttentionBackend(Protocol):
    """Makes a step's `attend`."""

    def begin(self, batch: Batch) -> Attend:
        """Prepare everything the layers share. The result is valid for this one batch."""
        ...
