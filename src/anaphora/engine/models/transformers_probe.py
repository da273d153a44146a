"""Proves at load that a model of transformers, on paged keys and values, computes what it computes by itself.

Two short random prompts run side by side, in two steps, through a tiny storage of their own. Watched are what each
layer asks of its attention and how often; compared are the logits with the model's own eager attention without a
cache. A third sequence of one token at the model's last position runs along and is ignored: a model whose positions
depend on the longest sequence of a batch, or that carries anything from one token to the next past its attention
(convolutions, token shift, recurrent states), disagrees and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from anaphora.engine.attention import Attend, TorchAttention
from anaphora.engine.batch import Batch, BatchRow
from anaphora.errors import UnsupportedModel
from anaphora.geometry.layout import CacheLayout
from anaphora.geometry.model import ModelGeometry
from anaphora.storage.codec import codec_for
from anaphora.storage.paged import PagedStorage
from anaphora.types import RequestId

_STEPS = ((5, 3), (3, 1))
"""Tokens of each of the two prompts per step: blocks are left half full, and one step decodes."""
PROBE_BLOCK_SIZE = 4

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Mean over positions of |paged - own| / |own - mean|, norms over the vocabulary."""

_HARMLESS = {"dropout", "position_ids", "sliding_window", "is_causal", "use_cache"}
"""Keywords of attention functions that are zero here, checked apart, or for other backends."""


class WatchableDecoder(Protocol):
    """What a probe needs: see TransformersDecoder."""

    dtype: torch.dtype
    device: torch.device

    def forward_watched(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, witness: LayerWitness
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def own_logits(self, token_ids: Tensor) -> Tensor: ...


def refusal(name: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name} cannot run here: {reason}. Serve it with vLLM or llama.cpp, or choose a decoder whose every layer "
        "keeps plain keys and values"
    )


class LayerWitness:
    """Sees each layer's call of the attention function. State changes: remembers the calls until `check`."""

    def __init__(self, geometry: ModelGeometry) -> None:
        self._geometry = geometry
        self._calls: list[tuple[int, set[int | None]]] = []

    def see(self, module: Any, key: Tensor, value: Tensor, mask: Tensor | None, keywords: Mapping[str, Any]) -> None:
        """Raises UnsupportedModel when the layer wants something of its attention that it would not get."""
        layers = self._geometry.layers
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer >= len(layers):
            raise self._refusal(
                f"its {type(module).__name__} is none of its {len(layers)} layers (layer_idx {layer!r})"
            )
        if not keywords.get("is_causal", getattr(module, "is_causal", True)):
            raise self._refusal(f"layer {layer} attends to later tokens too (config.json lacks is_decoder: true)")
        unknown = sorted(k for k, v in keywords.items() if k not in _HARMLESS and v is not None and v is not False)
        if unknown:
            raise self._refusal(f"layer {layer} gives its attention {', '.join(unknown)}, which has no meaning here")
        expected = layers[layer]
        shape = (key.shape[1], key.shape[3], value.shape[3])
        if shape != (expected.kv_heads, expected.key_dim, expected.value_dim):
            raise self._refusal(
                f"layer {layer} keeps {shape[0]} KV heads of {shape[1]} and {shape[2]} elements, by config.json "
                f"{expected.kv_heads} of {expected.key_dim} and {expected.value_dim}"
            )
        windows: set[int | None] = set()
        if mask is not None:
            number = mask.flatten()[0]
            if not bool((mask == number).all()):
                raise self._refusal(f"layer {layer} adds a bias of its own to the attention mask")
            windows.add(int(number) or None)
        if keywords.get("sliding_window"):
            windows.add(keywords["sliding_window"])
        self._calls.append((layer, windows))

    def check(self) -> None:
        """After a forward. Raises UnsupportedModel unless every layer attended once, within the expected window."""
        calls, self._calls = self._calls, []
        layers = self._geometry.layers
        if sorted(layer for layer, _ in calls) != list(range(len(layers))):
            raise self._refusal(
                f"its {len(layers)} layers attended {len(calls)} times through the attention interface of "
                "transformers, not once each"
            )
        for layer, windows in calls:
            expected = layers[layer].window
            if windows - {expected}:
                asked = " and ".join(f"{window} tokens" if window else "all tokens" for window in windows)
                raise self._refusal(
                    f"layer {layer} sees {asked} in transformers, {expected or 'all'} tokens by config.json; "
                    "check sliding_window and layer_types there"
                )

    def _refusal(self, reason: str) -> UnsupportedModel:
        return refusal(self._geometry.architecture, reason)


def probe(decoder: WatchableDecoder, geometry: ModelGeometry, layout: CacheLayout, longest: int | None) -> None:
    """Run it. `layout` is of any block size, `longest` - 1 the last position that will ever run (None = unknown).

    Raises UnsupportedModel, with the reason; other exceptions are those of the model's code.
    """
    random = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(geometry.vocab_size, (sum(counts),), generator=random).to(decoder.device)
        for counts in zip(*_STEPS, strict=True)
    ]
    paged = _paged_logits(decoder, geometry, layout, longest, prompts)
    own = torch.cat([decoder.own_logits(prompt) for prompt in prompts])
    scale = (own - own.mean(-1, keepdim=True)).norm(dim=-1)
    difference = float(((paged - own).norm(dim=-1) / scale).mean())
    if not difference <= _TOLERANCE[decoder.dtype]:
        raise refusal(
            geometry.architecture,
            f"on paged keys and values its logits differ by {difference:.1%} from those of its own attention",
        )


def _paged_logits(
    decoder: WatchableDecoder,
    geometry: ModelGeometry,
    layout: CacheLayout,
    longest: int | None,
    prompts: list[Tensor],
) -> Tensor:
    """-> [all tokens of the first prompt, then of the second, vocab_size]."""
    tables = []
    num_blocks = 0
    for prompt in prompts:
        width = -(-len(prompt) // layout.block_size)
        tables.append(
            [tuple(range(num_blocks + g * width, num_blocks + (g + 1) * width)) for g in range(len(layout.groups))]
        )
        num_blocks += width * len(layout.groups)
    codec = codec_for(str(decoder.dtype).removeprefix("torch."), layout)
    backend = TorchAttention(PagedStorage(codec, num_blocks, decoder.device))
    witness = LayerWitness(geometry)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    for counts in _STEPS:
        rows = [
            BatchRow(RequestId(str(i)), tuple(prompt[start : start + n].tolist()), start, tuple(table), sample=True)
            for i, (prompt, n, start, table) in enumerate(zip(prompts, counts, done, tables, strict=True))
        ]
        batch = Batch(tuple(rows))
        tokens = [t for row in rows for t in row.token_ids]
        positions = [p for row in rows for p in range(row.start, row.start + len(row.token_ids))]
        if longest is not None:
            tokens.append(0)
            positions.append(longest - 1)
        hidden = decoder.forward_watched(
            torch.tensor(tokens, device=decoder.device),
            torch.tensor(positions, device=decoder.device),
            _for_first(batch.num_tokens, backend.begin(batch)),
            witness,
        )
        witness.check()
        for i, part in enumerate(torch.split(decoder.logits(hidden[: batch.num_tokens]), list(counts))):
            logits[i].append(part)
        done = [start + n for start, n in zip(done, counts, strict=True)]
    return torch.cat([part for parts in logits for part in parts])


def _for_first(n: int, attend: Attend) -> Attend:
    """`attend` for the first n tokens; those after them attend to nothing and get zeros."""

    def attend_first(layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        out = attend(layer, query[:n], key[:n], value[:n], **options)
        return torch.cat([out, out.new_zeros(len(query) - n, *out.shape[1:])])

    return attend_first
