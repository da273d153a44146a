"""One decoder for the families people run most, driven by a DecoderSpec.

    tokens -> embedding -> [ attention, MLP ] x layers -> norm -> logits

Queries, keys and values come from one fused product, gate and up from another. The order of operations and the
dtypes are those of transformers, so that greedy tokens agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from anaphora.engine.attention import Attend
from anaphora.engine.models.checkpoint import Checkpoint
from anaphora.engine.models.spec import Activation, DecoderSpec

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [out, in], bias [out]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Norm weights have their offset added, in float32 where the spec says they scale in float32."""

    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    attention_in: Tensor | None
    attention_out: Tensor | None
    mlp_in: Tensor | None
    mlp_out: Tensor | None
    qk_norm: Tensor | None
    """[query_heads + kv_heads, head_dim]"""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor
    """[vocab_size, hidden_size]"""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    """[vocab_size, hidden_size]; the embedding itself when tied."""

    def tensors(self) -> Iterator[Tensor]:
        """Every one; the tied head comes twice."""
        yield from (self.embedding, self.norm, self.head)
        for layer in self.layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                yield linear.weight
                if linear.bias is not None:
                    yield linear.bias
            norms = (layer.attention_in, layer.attention_out, layer.mlp_in, layer.mlp_out, layer.qk_norm)
            yield from (norm for norm in norms if norm is not None)


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


def load_compact_decoder(
    checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> CompactDecoder:
    """Read every tensor the spec names. Raises CorruptModel, naming file and tensor (see Checkpoint.read)."""
    return CompactDecoder(spec, _Loader(checkpoint, spec, dtype, device).weights())


class _Loader:
    """The names of the tensors, as the Llama family and those after it write them."""

    def __init__(self, checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._device = device
        # Language models inside multimodal ones carry a longer prefix than "model.".
        embeddings = (name for name in checkpoint.names if name.endswith("embed_tokens.weight"))
        self._prefix = min(embeddings, key=len, default="model.embed_tokens.weight").removesuffix("embed_tokens.weight")

    def weights(self) -> DecoderWeights:
        spec = self._spec
        vocabulary = (spec.vocab_size, spec.hidden_size)
        embedding = self._read((f"{self._prefix}embed_tokens.weight", vocabulary))
        head = embedding
        if not spec.tied_embeddings:
            heads = (name for name in self._checkpoint.names if name.endswith("lm_head.weight"))
            head = self._read((min(heads, key=len, default="lm_head.weight"), vocabulary))
        layers = tuple(self._layer(f"{self._prefix}layers.{index}.") for index in range(spec.num_layers))
        return DecoderWeights(embedding, layers, self._required_norm(f"{self._prefix}norm", spec.hidden_size), head)

    def _layer(self, prefix: str) -> LayerWeights:
        spec = self._spec
        hidden, inner = spec.hidden_size, spec.intermediate_size
        query, kv = spec.query_heads * spec.head_dim, spec.kv_heads * spec.head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        if spec.fused_weights:
            qkv_parts = {f"{attention}qkv_proj": query + 2 * kv}
            gate_up_parts = {f"{mlp}gate_up_proj": 2 * inner}
        else:
            qkv_parts = {f"{attention}q_proj": query, f"{attention}k_proj": kv, f"{attention}v_proj": kv}
            gate_up_parts = {f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}
        names = spec.norm_names
        return LayerWeights(
            qkv=self._linear(qkv_parts, hidden, spec.qkv_bias),
            output=self._linear({f"{attention}o_proj": hidden}, query, spec.output_bias),
            gate_up=self._linear(gate_up_parts, hidden, spec.mlp_bias),
            down=self._linear({f"{mlp}down_proj": hidden}, inner, spec.mlp_bias),
            attention_in=self._norm(prefix, names.attention_in, hidden),
            attention_out=self._norm(prefix, names.attention_out, hidden),
            mlp_in=self._norm(prefix, names.mlp_in, hidden),
            mlp_out=self._norm(prefix, names.mlp_out, hidden),
            qk_norm=self._qk_norm(attention),
        )

    def _linear(self, parts: dict[str, int], width: int, bias: bool) -> Linear:
        weight = self._read(*((f"{name}.weight", (rows, width)) for name, rows in parts.items()))
        return Linear(
            weight, self._read(*((f"{name}.bias", (rows,)) for name, rows in parts.items())) if bias else None
        )

    def _qk_norm(self, prefix: str) -> Tensor | None:
        spec = self._spec
        if spec.qk_norm is None:
            return None
        parts = []
        for name, heads in (("q_norm", spec.query_heads), ("k_norm", spec.kv_heads)):
            stored = spec.head_dim * (heads if spec.qk_norm == "projection" else 1)
            parts.append(self._required_norm(prefix + name, stored).view(-1, spec.head_dim).expand(heads, -1))
        return torch.cat(parts)

    def _norm(self, prefix: str, name: str | None, width: int) -> Tensor | None:
        return None if name is None else self._required_norm(prefix + name, width)

    def _required_norm(self, name: str, width: int) -> Tensor:
        dtype = torch.float32 if self._spec.norm_scales_in_float32 else self._dtype
        weight = self._checkpoint.read([(f"{name}.weight", (width,))], dtype, self._device)
        return weight + self._spec.norm_offset if self._spec.norm_offset else weight

    def _read(self, *parts: tuple[str, tuple[int, ...]]) -> Tensor:
        return self._checkpoint.read(parts, self._dtype, self._device)
