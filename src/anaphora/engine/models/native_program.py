"""A DecoderSpec and its weights, recorded as a native program: one list of operations that runs a whole step.

    embed -> [ qkv (normed first) | attention (norm of queries and keys, positions, KV write) | output, added
               gate and up (normed first, activated) | down, added ] x layers -> logits (normed first)

Hidden states are float32 throughout. The weights stay as the file has them, so a bfloat16 model computes what it would
in float32: every product takes exact weights and float32 states. They are packed as they are read, layer by layer.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from anaphora.engine.models.spec import DecoderSpec
from anaphora.engine.models.weights import LayerWeights, Linear, WeightReader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from anaphora import _native


class Recorder:
    """Records one model. State changes, all in `program`: operations, and the weights they hold."""

    def __init__(self, native: ModuleType, spec: DecoderSpec, read: WeightReader) -> None:
        self._native = native
        self._spec = spec
        self._read = read
        self.weight_bytes = 0
        """Of all packed weights; tied ones once."""
        self.program: _native.Program = native.Program(spec.query_heads, spec.kv_heads, spec.head_dim)
        buffer = self.program.buffer
        self._hidden = buffer(spec.hidden_size)
        self._branch = buffer(spec.hidden_size)
        self._qkv = buffer((spec.query_heads + 2 * spec.kv_heads) * spec.head_dim)
        self._mixed = buffer(spec.query_heads * spec.head_dim)
        self._gated = buffer(spec.intermediate_size)
        self._ropes = {
            rope: self.program.rope(np.array(rope.inverse_frequencies, np.float32), rope.magnitude)
            for rope in dict.fromkeys(spec.ropes)
            if rope is not None
        }

    def record(self) -> _native.Program:
        """Read and pack every weight. Raises CorruptModel (see Checkpoint.read)."""
        spec, program = self._spec, self.program
        embedding = self._pack(self._read.embedding())
        program.embed(self._hidden, embedding, spec.embedding_scale)
        for index in range(spec.num_layers):
            self._layer(index, self._read.layer(index))
        program.logits(
            self._hidden,
            embedding if spec.tied_embeddings else self._pack(self._read.head()),
            norm=_floats(self._read.norm()),
            norm_eps=spec.norm_eps,
            scale=1.0 / spec.logit_divisor,
            softcap=spec.logit_softcap,
        )
        return program

    def _layer(self, index: int, layer: LayerWeights) -> None:
        spec, rope = self._spec, self._spec.ropes[index]
        self._product(self._qkv, self._hidden, layer.qkv, layer.attention_in)
        self.program.attention(
            self._mixed,
            self._qkv,
            index,
            rope=None if rope is None else self._ropes[rope],
            scale=spec.attention_scale,
            softcap=spec.attention_softcap,
            norm=None if layer.qk_norm is None else _floats(layer.qk_norm),
            norm_over=spec.qk_norm or "head",
            norm_eps=spec.norm_eps,
        )
        self._add(self._mixed, layer.output, layer.attention_out)
        self._product(self._gated, self._hidden, layer.gate_up, layer.mlp_in, activation=spec.activation)
        self._add(self._gated, layer.down, layer.mlp_out)

    def _product(self, out: int, x: int, linear: Linear, norm: Tensor | None, *, activation: str | None = None) -> None:
        """out = linear(norm(x)); with an activation, its first half activated times its second."""
        self.program.linear(
            out,
            x,
            self._pack(linear.weight, linear.bias, gated=activation is not None),
            norm=None if norm is None else _floats(norm),
            norm_eps=self._spec.norm_eps,
            activation=activation,
        )

    def _add(self, x: int, linear: Linear, norm: Tensor | None) -> None:
        """hidden += norm(linear(x)) * residual_scale"""
        weights, scale = self._pack(linear.weight, linear.bias), self._spec.residual_scale
        if norm is None:
            self.program.linear(self._hidden, x, weights, scale=scale, add=True)
        else:
            self.program.linear(self._branch, x, weights)
            self.program.norm(self._hidden, self._branch, _floats(norm), self._spec.norm_eps, scale=scale, add=True)

    def _pack(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> _native.Weights:
        packed: _native.Weights = self._native.Weights(weight, None if bias is None else _floats(bias), gated=gated)
        self.weight_bytes += packed.nbytes
        return packed


def _floats(tensor: Tensor) -> NDArray[np.float32]:
    floats: NDArray[np.float32] = tensor.float().contiguous().numpy()
    return floats
