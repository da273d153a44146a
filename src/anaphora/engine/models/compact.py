"""One decoder for the families people run most, driven by a DecoderSpec.

    tokens -> embedding -> [ attention, MLP ] x layers -> norm -> logits

Queries, keys and values come from one fused product, gate and up from another. The order of operations and the
dtypes are those of transformers, so that greedy tokens agree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from anaphora.engine.attention import Attend
from anaphora.engine.models.checkpoint import Checkpoint
from anaphora.engine.models.spec import Activation, DecoderSpec
from anaphora.engine.models.weights import DecoderWeights, LayerWeights, WeightReader

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


class CompactDecoder:
    """See `protocol.Decoder`."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights) -> None:
        self.spec = spec
        self._weights = weights
        self._activation = _ACTIVATIONS[spec.activation]
        # The embedding's scale is rounded to the model's dtype, as the families' reference code does.
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=self.dtype))

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._weights.embedding.device

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in self._weights.tensors()}.values())

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        spec = self.spec
        turns = {rope: rope.cos_sin(positions, self.dtype) if rope else None for rope in set(spec.ropes)}
        hidden = functional.embedding(token_ids, self._weights.embedding)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        for index, layer in enumerate(self._weights.layers):
            normed = self._norm(hidden, layer.attention_in)
            out = self._attention(index, layer, normed, turns[spec.ropes[index]], attend)
            hidden = self._add(hidden, self._norm(out, layer.attention_out))
            gate, up = layer.gate_up(self._norm(hidden, layer.mlp_in)).chunk(2, dim=-1)
            out = layer.down(self._activation(gate) * up)
            hidden = self._add(hidden, self._norm(out, layer.mlp_out))
        return self._norm(hidden, self._weights.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = functional.linear(hidden, self._weights.head)
        if self.spec.logit_divisor != 1.0:
            logits = logits / self.spec.logit_divisor
        if self.spec.logit_softcap is not None:
            logits = torch.tanh(logits / self.spec.logit_softcap) * self.spec.logit_softcap
        return logits.float()

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, turn: tuple[Tensor, Tensor] | None, attend: Attend
    ) -> Tensor:
        spec = self.spec
        tokens = len(x)
        # [T, query heads | key heads | value heads, head_dim]; queries and keys are normed and turned in one go
        heads = spec.query_heads + spec.kv_heads
        qk, value = torch.split(layer.qkv(x).view(tokens, -1, spec.head_dim), [heads, spec.kv_heads], dim=1)
        if layer.qk_norm is not None:
            qk = self._norm_qk(qk, layer.qk_norm)
        if turn is not None:
            qk = _rotate(qk, *turn)
        query, key = torch.split(qk, [spec.query_heads, spec.kv_heads], dim=1)
        out = attend(index, query, key, value, scale=spec.attention_scale, softcap=spec.attention_softcap)
        return layer.output(out.flatten(1))

    def _norm_qk(self, qk: Tensor, weight: Tensor) -> Tensor:
        """qk [T, query_heads + kv_heads, head_dim]: over each head, or over all queries and over all keys."""
        if self.spec.qk_norm == "head":
            return self._norm(qk, weight)
        queries, keys = slice(self.spec.query_heads), slice(self.spec.query_heads, None)
        normed = [self._norm(qk[:, part].flatten(1), weight[part].flatten()) for part in (queries, keys)]
        return torch.cat(normed, dim=1).view_as(qk)

    def _add(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + (x if self.spec.residual_scale == 1.0 else x * self.spec.residual_scale)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """RMS norm over the last axis, computed in float32; x itself when there is no weight."""
        if weight is None:
            return x
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.spec.norm_eps)
        if self.spec.norm_scales_in_float32:
            return (normed * weight).to(x.dtype)
        return normed.to(x.dtype) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs (i, i + rotary / 2) of the first `rotary` elements. x [T, heads, head_dim], cos [T, 1, rotary / 2]."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def streamed_hidden(
    checkpoint: Checkpoint, spec: DecoderSpec, token_ids: Tensor, positions: Tensor, attend: Attend
) -> Tensor:
    """`Decoder.forward` in float32 on the CPU, every layer read when its turn comes and then forgotten."""
    read = WeightReader(checkpoint, spec, torch.float32, torch.device("cpu"))
    embedding = read.embedding()
    layers = (read.layer(index) for index in range(spec.num_layers))
    decoder = CompactDecoder(spec, DecoderWeights(embedding, layers, read.norm(), embedding))
    return decoder.forward(token_ids, positions, attend)


def load_compact_decoder(
    checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> CompactDecoder:
    """Read every tensor the spec names. Raises CorruptModel, naming file and tensor (see Checkpoint.read)."""
    read = WeightReader(checkpoint, spec, dtype, device)
    embedding = read.embedding()
    head = embedding if spec.tied_embeddings else read.head()
    layers = tuple(read.layer(index) for index in range(spec.num_layers))
    return CompactDecoder(spec, DecoderWeights(embedding, layers, read.norm(), head))
