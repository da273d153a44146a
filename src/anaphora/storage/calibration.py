"""Constants of a model that its stored keys and values depend on: moments of every channel, from a built-in text.

Keys are seen after their positional encoding, and what a channel holds depends on the position: RoPE turns its pairs,
the slow ones by less than a full turn within the whole context. Moments taken at positions 0 .. 511 alone are wrong at
8,000 (docs/quantization.md has the figures). So the text is cut into segments that stand at positions all over the
context, each attending to itself alone; every model's relative positions allow that, in one pass.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from anaphora.errors import AnaphoraError

VERSION = 1
"""Of the text, of how moments are taken, and of the transforms made of them."""

_TOKENS = 512
_PLACES = (0.0, 1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 15 / 16)
"""Where the segments stand, as shares of the context: closer together where most tokens of most requests are."""
_LONGEST = 32768
"""Tokens; a context beyond is calibrated as if it were so long."""


@dataclass(frozen=True, slots=True)
class LayerMoments:
    """Of one layer, each [kv_heads, dim] float32. Those of queries are over the query heads that read the KV head."""

    query_rms: Tensor
    key_mean: Tensor
    key_rms: Tensor
    """Around the mean."""
    value_mean: Tensor


@dataclass(frozen=True, slots=True)
class Calibration:
    """Moments of every layer."""

    layers: tuple[LayerMoments, ...]

    @property
    def digest(self) -> str:
        """16 hexadecimal digits over the version and every bit of the moments."""
        return hashlib.blake2b(self.to_bytes(), digest_size=8).hexdigest()

    def to_bytes(self) -> bytes:
        """A line of JSON, then the moments, little endian."""
        shapes = [[list(getattr(layer, field.name).shape) for field in fields(LayerMoments)] for layer in self.layers]
        head = json.dumps({"version": VERSION, "shapes": shapes}, separators=(",", ":")).encode() + b"\n"
        tensors = (getattr(layer, field.name) for layer in self.layers for field in fields(LayerMoments))
        return head + b"".join(tensor.float().numpy().astype("<f4").tobytes() for tensor in tensors)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Calibration | None:
        """None when it is of another version or not whole: then calibrate anew."""
        head, _, body = raw.partition(b"\n")
        try:
            stated = json.loads(head)
            if stated["version"] != VERSION:
                return None
            layers = []
            numbers = torch.frombuffer(bytearray(body), dtype=torch.float32)
            for shapes in stated["shapes"]:
                sizes = [heads * dim for heads, dim in shapes]
                *parts, numbers = torch.split(numbers, [*sizes, len(numbers) - sum(sizes)])
                layers.append(LayerMoments(*(p.view(*shape) for p, shape in zip(parts, shapes, strict=True))))
        except (ValueError, KeyError, TypeError, RuntimeError):
            return None
        return cls(tuple(layers)) if not len(numbers) and layers else None

    @classmethod
    def neutral(cls, num_layers: int, kv_heads: int, key_dim: int, value_dim: int) -> Calibration:
        """Knows nothing of the model: every channel alike. What is left of the transforms is their spreading."""
        ones, zeros = torch.ones(kv_heads, key_dim), torch.zeros(kv_heads, key_dim)
        return cls((LayerMoments(ones, zeros, ones, torch.zeros(kv_heads, value_dim)),) * num_layers)


class Calibrator:
    """One pass of a decoder over the built-in text:

    calibrator = Calibrator(tokenizer ids of calibration_text.TEXT, max_position, num_layers, kv_heads)
    decoder.forward(calibrator.token_ids, calibrator.positions, calibrator)
    calibration = calibrator.result()

    It is the pass's `attend` (engine/attention.py): it attends within each segment and notes the moments.
    """

    def __init__(self, token_ids: Sequence[int], max_position: int | None, num_layers: int, kv_heads: int) -> None:
        """`max_position`: the model's context in tokens; None: no bound is known."""
        self._kv_heads = kv_heads
        self._moments: list[LayerMoments | None] = [None] * num_layers
        context = min(max_position or _LONGEST, _LONGEST)
        self._length = max(2, min(len(token_ids), _TOKENS, context) // len(_PLACES))
        used = (list(token_ids) * _TOKENS)[: self._length * len(_PLACES)]
        begins = [max(0, min(int(place * context), context - self._length)) for place in _PLACES]
        self.token_ids = torch.tensor(used, dtype=torch.long)
        self.positions = torch.tensor([b + i for b in begins for i in range(self._length)], dtype=torch.long)

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
        """See engine.attention.Attend; windows are not looked at, segments are shorter. State changes: the moments."""
        # [segments, length, kv_heads, query heads per KV head, dim]
        shape = (len(_PLACES), self._length, self._kv_heads)
        queries = query.float().view(*shape, -1, query.shape[-1])
        keys, values = (x.float().view(*shape, x.shape[-1]) for x in (key, value))
        # A mean of keys adds the same to every score of a query; a cap or a sink tells that from nothing.
        capped, sunk = softcap is not None, sinks is not None
        self._moments[layer] = _moments(queries, keys, values, center_keys=not (capped or sunk), center_values=not sunk)
        scores = torch.einsum("sihgd,sjhd->shgij", queries, keys) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        steps = torch.arange(self._length, device=scores.device)
        heads = (self._kv_heads, -1, 1, 1)
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.float().view(heads) * (steps - steps[:, None])
        scores = scores.masked_fill(steps > steps[:, None], -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(heads).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., : self._length]
        return torch.einsum("shgij,sjhd->sihgd", weights, values).reshape(*query.shape[:2], -1).to(query.dtype)

    def result(self) -> Calibration:
        """Raises AnaphoraError when the pass was not whole, or made numbers that are not finite (naming the layer)."""
        layers = [moments for moments in self._moments if moments is not None]
        if len(layers) != len(self._moments):
            raise AnaphoraError("the decoder skipped layers when it was calibrated; use --kv-cache-dtype auto")
        for index, layer in enumerate(layers):
            if not all(bool(getattr(layer, field.name).isfinite().all()) for field in fields(layer)):
                raise AnaphoraError(
                    f"layer {index} made keys or values that are NaN or infinite of an ordinary text: "
                    "fetch the weights again, or try --dtype float32"
                )
        return Calibration(tuple(layers))


def _moments(queries: Tensor, keys: Tensor, values: Tensor, *, center_keys: bool, center_values: bool) -> LayerMoments:
    """Over the segments' tokens, but for the first of each, which is a sink with keys like no other's."""
    flat_keys, flat_values = keys[:, 1:].flatten(0, 1).double(), values[:, 1:].flatten(0, 1).double()
    key_mean = flat_keys.mean(0) * center_keys
    return LayerMoments(
        queries[:, 1:].double().square().mean((0, 1, 3)).sqrt().float().cpu(),
        key_mean.float().cpu(),
        (flat_keys - key_mean).square().mean(0).sqrt().float().cpu(),
        (flat_values.mean(0) * center_values).float().cpu(),
    )
