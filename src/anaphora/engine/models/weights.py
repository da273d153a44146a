"""The weights of a decoder with a spec: which tensors of the file make up a layer, read layer by layer.

The names are those that the Llama family and those after it write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from anaphora.engine.models.checkpoint import Checkpoint
from anaphora.engine.models.spec import DecoderSpec


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
    layers: Iterable[LayerWeights]
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


class WeightReader:
    """Every method reads the files anew. Raises CorruptModel, naming file and tensor (see Checkpoint.read)."""

    def __init__(self, checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._vocabulary = (spec.vocab_size, spec.hidden_size)
        # Language models inside multimodal ones carry a longer prefix than "model.".
        embeddings = (name for name in checkpoint.names if name.endswith("embed_tokens.weight"))
        self._prefix = min(embeddings, key=len, default="model.embed_tokens.weight").removesuffix("embed_tokens.weight")

    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size]"""
        return self._read((f"{self._prefix}embed_tokens.weight", self._vocabulary))

    def head(self) -> Tensor:
        """[vocab_size, hidden_size], of a model whose head is not the embedding."""
        heads = (name for name in self._checkpoint.names if name.endswith("lm_head.weight"))
        return self._read((min(heads, key=len, default="lm_head.weight"), self._vocabulary))

    def norm(self) -> Tensor:
        """The last one, [hidden_size]."""
        return self._required_norm(f"{self._prefix}norm", self._spec.hidden_size)

    def layer(self, index: int) -> LayerWeights:
        spec, prefix = self._spec, f"{self._prefix}layers.{index}."
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
