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
PLACES = (0.0, 1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 15 / 16)
"""Where the segments stand, as shares of the context: closer together where most tokens of most requests are."""
_LONGEST = 32768
"""Tokens; a context beyond is calibrated as if it were so long."""


@dataclass(frozen=True, slots=True)
class LayerMoments:
    """Of one layer, each [kv_heads, dim] float32. Those of queries are over the query heads that read the KV head."""

    query_rms: Tensor
    key_mean: Tensor
    """Every token weighs what an error of its score changes in the outputs: the first ones, the sinks, weigh most."""
    key_rms: Tensor
    """Around the mean, weighted likewise."""
    value_rms: Tensor
    """Of the whole head, the same for all its channels."""


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
        return cls((LayerMoments(ones, zeros, ones, torch.ones(kv_heads, value_dim)),) * num_layers)


class Calibrator:
    """One pass of a decoder over the built-in text:

    calibrator = Calibrator(tokenizer ids of calibration_text.TEXT, max_position, num_layers, kv_heads)
    decoder.forward(calibrator.token_ids, calibrator.positions, calibrator)
    calibration = calibrator.result()

    It is the pass's `attend` (engine/attention.py): it attends within each segment and notes the moments.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        max_position: int | None,
        num_layers: int,
        kv_heads: int,
        places: Sequence[float] = PLACES,
    ) -> None:
        """`max_position`: the model's context in tokens; None: no bound is known. `places`: one per segment."""
        self._kv_heads = kv_heads
        self._moments: list[LayerMoments | None] = [None] * num_layers
        context = min(max_position or _LONGEST, _LONGEST)
        self._segments = len(places)
        self._length = max(2, min(len(token_ids), _TOKENS, context) // self._segments)
        used = (list(token_ids) * _TOKENS)[: self._length * self._segments]
        begins = [max(0, min(int(place * context), context - self._length)) for place in places]
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
        shape = (self._segments, self._length, self._kv_heads)
        queries = query.float().view(*shape, -1, query.shape[-1])
        keys, values = (x.float().view(*shape, x.shape[-1]) for x in (key, value))
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
        outputs = torch.einsum("shgij,sjhd->sihgd", weights, values)
        # A mean of keys adds the same to every score of a query, which softmax does not see; a cap or a sink does.
        blind = softcap is None and sinks is None
        self._moments[layer] = _moments(queries, keys, values, _costs(weights, outputs, values), blind=blind)
        return outputs.reshape(*query.shape[:2], -1).to(query.dtype)

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


def _costs(weights: Tensor, outputs: Tensor, values: Tensor) -> Tensor:
    """[segments, length, kv_heads], of sum 1 over tokens: what an error of a key's scores changes in the outputs.

    d output_i / d score_ij = weight_ij (value_j - output_i), squared and summed over the queries i.
    """
    products = torch.einsum("sihgd,sjhd->shgij", outputs, values)
    sizes = values.square().sum(-1).permute(0, 2, 1)[:, :, None, None]
    distances = sizes + outputs.square().sum(-1).permute(0, 2, 3, 1)[..., None] - 2 * products
    costs = (weights.square() * distances.clamp_min(0)).sum((2, 3)).permute(0, 2, 1).double()
    return costs / costs.sum((0, 1), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def _moments(queries: Tensor, keys: Tensor, values: Tensor, costs: Tensor, *, blind: bool) -> LayerMoments:
    keys, values = keys.double(), values.double()
    key_mean = torch.einsum("sjh,sjhd->hd", costs, keys) * blind
    key_rms = torch.einsum("sjh,sjhd->hd", costs, (keys - key_mean).square()).sqrt()
    value_rms = values.square().mean((0, 1, 3)).sqrt()[:, None].expand(-1, values.shape[-1])
    query_rms = queries.double().square().mean((0, 1, 3)).sqrt()
    return LayerMoments(*(x.float().cpu() for x in (query_rms, key_mean, key_rms, value_rms)))
