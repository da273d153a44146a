"""The native kernels (native/). Import them through anaphora.native.load(), which knows when there are none."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy
import numpy.typing

class Array(Protocol):
    """A tensor of torch or an array of numpy, on the CPU, contiguous."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

def targets() -> list[str]:
    """Instruction sets that the kernels were compiled for and this processor runs; the best last."""

def target() -> str:
    """The one in use."""

def lanes() -> int:
    """float32 values in one vector of the target in use."""

def set_target(name: str) -> None:
    """Use another one, everywhere and at once. Raises ValueError when it is not among targets()."""

def threads() -> int:
    """Threads that kernels run on, the caller's included."""

def set_threads(threads: int) -> None:
    """From the next call on. Raises ValueError below 1."""

class KVStorage:
    """The memory of a storage/paged.py PagedStorage, as the kernels see it; keeps it alive."""

    def __init__(
        self,
        data: Array,
        block_size: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        layers: Sequence[tuple[int, int, int, int, str, str]],
        turns: Sequence[tuple[tuple[Array, ...] | None, tuple[Array, ...] | None]] = (),
    ) -> None:
        """data uint8 [num_blocks, block_bytes]; block_size 16, 32, 64, 128 or 256.

        layers: of each layer (cache group, offset, key_bytes, value_bytes, keys' format, values' format), as
        storage/codec.py's LayerCodec has them. turns: of each layer, or of none at all, the float32 arrays of its
        KeyTransform (mean [kv_heads, key_dim], keys and queries [kv_heads, key_dim, key_dim]) and of its ValueTransform
        (rms [kv_heads], spread [value_dim, value_dim]), None where it has none. Raises ValueError for a format that has
        no kernels, or dims that do not suit it.
        """

def read(memory: Array) -> None:
    """Read uint8 [bytes] on all threads, whole pieces of 64 KiB: what a measured read bandwidth is made of."""

class Step:
    """One batch's attention: what the layers share. Steps of one storage run one at a time."""

    def __init__(
        self,
        storage: KVStorage,
        starts: Array,
        counts: Array,
        blocks: Array,
        offsets: Array,
        windows: Sequence[int],
        strategy: str = "chosen",
    ) -> None:
        """starts, counts int32 [rows]; blocks int32 [n], the rows' block tables laid end to end, group by group.

        offsets int64 [groups * rows + 1]: the table of group g and row r is
        blocks[offsets[g * rows + r] : offsets[g * rows + r + 1]]. windows: of each group, 0 for none.
        strategy: "chosen" by a cost estimate, or forced: "by_partition", "by_query"; no bit depends on it.
        Raises ValueError when a row sees a position that its table does not cover, or a block that does not exist.
        """

    def write_kv(self, layer: int, key: Array, value: Array) -> None:
        """key [T, kv_heads, key_dim], value [T, kv_heads, value_dim] float32; tokens any stride apart.

        State changes: the storage.
        """

    @property
    def not_finite(self) -> tuple[int, str] | None:
        """The first layer that was given NaN or infinity for a format with scales, and `keys` or `values`.

        What the step has stored means nothing then.
        """

    def attend(
        self,
        layer: int,
        query: Array,
        out: Array,
        scale: float,
        softcap: float = 0.0,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
    ) -> None:
        """query [T, query_heads, key_dim] -> out [T, query_heads, value_dim], float32;
        see engine/attention.py's Attend.

        The step's keys and values must be written. softcap 0: none. State changes: out.
        """

    def tokens_read(self, group: int, query_heads: int) -> int:
        """Stored tokens that one layer of the group reads for each KV head; shared ones count once."""

class Weights:
    """The weights of one linear layer, packed for the kernels. Holds a copy; what it was made from may be freed."""

    def __init__(self, weight: Array, bias: Array | None = None, *, gated: bool = False) -> None:
        """weight [outputs, inputs] bfloat16 or float32 (kept so), bias [outputs] float32; torch or numpy, contiguous.

        gated: the first half of the outputs is the gate of the second, and `outputs` counts one half.
        """

    @property
    def inputs(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight, filled up to whole panels of 16 outputs."""

class Program:
    """A decoder, recorded operation by operation and run once per step without Python in between.

    Buffers are float32 [tokens of the step, width]. Every result depends on its own row alone, to the bit. All
    methods raise ValueError when shapes do not fit. One thread at a time; `run` releases the GIL.
    """

    def __init__(self, query_heads: int = 0, kv_heads: int = 0, head_dim: int = 0) -> None: ...
    def buffer(self, width: int) -> int:
        """A new one; its number."""

    def rope(self, inverse_frequencies: Array, magnitude: float = 1.0) -> int:
        """Rotary positions (see engine/models/rope.py), computed once per step; their number."""

    def embed(self, out: int, table: Weights, scale: float = 1.0) -> None:
        """out = scale * table[token id]; tied embeddings share their Weights with `logits`."""

    def norm(self, out: int, x: int, weight: Array, eps: float, *, scale: float = 1.0, add: bool = False) -> None:
        """out = rms_norm(x) * weight * scale, or out += that. out may be x."""

    def linear(
        self,
        out: int,
        x: int,
        weights: Weights,
        *,
        norm: Array | None = None,
        norm_eps: float = 0.0,
        scale: float = 1.0,
        activation: str | None = None,
        add: bool = False,
    ) -> None:
        """y = (x weight^T + bias) * scale, x RMS-normed first when `norm` [inputs] is given; out = y, or out += y.

        activation: "silu", "gelu", "gelu_tanh" or "relu"; of gated weights' gate: y = activation(gate) * other half.
        """

    def attention(
        self,
        out: int,
        qkv: int,
        layer: int,
        *,
        rope: int | None = None,
        scale: float,
        softcap: float | None = None,
        norm: Array | None = None,
        norm_over: str = "head",
        norm_eps: float = 0.0,
    ) -> None:
        """Norm and turn queries and keys, store keys and values, attend (see engine/attention.py).

        qkv [T, (query heads | key heads | value heads) * head_dim] is changed in place; out
        [T, query_heads * head_dim].
        norm [query_heads + kv_heads, head_dim], over each "head" or over all queries and all keys ("projection").
        """

    def logits(
        self,
        x: int,
        weights: Weights,
        *,
        norm: Array | None = None,
        norm_eps: float = 0.0,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """The last operation, for the wanted rows only: norm, product, * scale, softcap * tanh(y / softcap)."""

    def run(
        self,
        step: Step | None,
        token_ids: Array,
        positions: Array,
        wanted: Array,
        logits: Array,
        best: Array | None = None,
    ) -> None:
        """token_ids, positions int64 [T]; wanted int32 [W], numbers of rows; logits float32 [W, vocabulary], written.

        best int64 [W], written: the lowest token id of each row's largest logit; NaN counts as larger than any.

        State changes: logits, best, and the storage of the step. Raises ValueError, with nothing changed, for a
        token id or a row that is not there, and without a step when the program attends.
        """

    def values(self, buffer: int) -> numpy.typing.NDArray[numpy.float32]:
        """A copy of what the last run left in a buffer: [T, width]."""
