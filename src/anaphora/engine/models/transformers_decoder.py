"""Any decoder that transformers can load, on our paged keys and values, through its attention interface.

transformers lets an attention function be registered by name; a model loaded with that name calls it in every
layer instead of its own attention. Ours hands query, key and value to the step's `attend`, which reaches it as a
forward keyword. What it needs besides:

    mask      Causality and windows are `attend`'s affair. The mask function registered under the same name therefore
              makes no mask, but one number (the window the model asks for), which is checked at load. Not to register
              one would leave every layer without a mask, silently.
    keyword   Some models drop unknown keywords between their own forward and their attention (StableLM, Nemotron).
              There a hook on the attention modules adds it to their call.
    logits    The model's own forward, its backbone replaced by one that returns the hidden states it is given: scales
              and soft caps of the logits are the model's own code.

Whatever does not fit is refused at load: see transformers_probe.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)

from anaphora.engine.attention import Attend
from anaphora.engine.models.transformers_probe import PROBE_BLOCK_SIZE, LayerWitness, probe, refusal
from anaphora.errors import AnaphoraError, CorruptModel
from anaphora.geometry.layout import CacheLayout
from anaphora.geometry.model import ModelGeometry

_ATTENTION = "anaphora_paged"
_AGAIN = "fetch the model again (anaphora pull)"


class _KeywordLost(Exception):
    """The model's code dropped our keywords on the way to its attention modules, which are `kind`."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(kind)
        self.kind = kind


def _paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attend | None = None,
    witness: LayerWitness | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers: query [1, Hq, T, Dk], key and value [1, Hkv, T, D] -> [1, T, Hq, Dv].

    `s_aux` are the sinks. `witness` is there at load only, and is shown what the layer asks for.
    """
    if attend is None:
        raise _KeywordLost(type(module))
    if witness is not None:
        witness.see(module, key, value, attention_mask, others)
    out = attend(
        module.layer_idx,
        query[0].transpose(0, 1).to(value.dtype),
        key[0].transpose(0, 1).to(value.dtype),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


def _window_instead_of_mask(*, device: Any, local_size: int | None = None, **_: Any) -> Tensor:
    """Mask function of transformers: one number in a mask's four dimensions, the layer's window (0 = none)."""
    return torch.full((1, 1, 1, 1), float(local_size or 0), device=device)


AttentionInterface.register(_ATTENTION, _paged_attention)
AttentionMaskInterface.register(_ATTENTION, _window_instead_of_mask)


class _Relay:
    """Adds the running step's keywords to the calls of attention modules that the model's code does not give them."""

    def __init__(self) -> None:
        self._keywords: dict[str, Any] = {}
        self._kinds: set[type[nn.Module]] = set()

    def attach(self, model: nn.Module, kind: type[nn.Module]) -> None:
        """Raises UnsupportedModel when modules of this kind have it already: it did not help. State changes: hooks."""
        if kind in self._kinds:
            raise refusal(type(model).__name__, f"{kind.__name__} hands no keywords on to its attention function")
        self._kinds.add(kind)
        for module in model.modules():
            if type(module) is kind:
                module.register_forward_pre_hook(self._add, with_kwargs=True)

    @contextmanager
    def carrying(self, keywords: dict[str, Any]) -> Iterator[None]:
        self._keywords = keywords
        try:
            yield
        finally:
            self._keywords = {}

    def _add(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, **self._keywords}


class _Given(nn.Module):
    """Stands where the backbone was and returns the hidden states it is given as embeddings."""

    @property
    def decoder(self) -> _Given:
        """OPT's head calls the decoder inside its backbone."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return _HiddenStates(last_hidden_state=inputs_embeds)


class _HiddenStates(SimpleNamespace):
    """A backbone's output with nothing but its hidden states, in the two ways heads read it."""

    def __getitem__(self, index: int) -> Tensor:
        hidden: tuple[Tensor, ...] = (self.last_hidden_state,)
        return hidden[index]

    def __getattr__(self, name: str) -> None:
        """Past, router logits and the like: not computed."""


class TransformersDecoder:
    """A `Decoder` (see protocol.py) around a causal language model of transformers in evaluation mode."""

    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device, scaled_for: int | None) -> None:
        self._model = model
        self._backbone = model.base_model
        self._head = copy.copy(model)  # shares every weight
        vars(self._head)["_modules"] = {**model._modules, model.base_model_prefix: _Given()}
        self._relay = _Relay()
        self.dtype = dtype
        self.device = device
        self.scaled_for = scaled_for
        """The longest sequence that rotary positions are scaled for; None = they do not depend on it."""
        self.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self._run(token_ids, positions, {"attend": attend})

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()

    def forward_watched(self, token_ids: Tensor, positions: Tensor, attend: Attend, witness: LayerWitness) -> Tensor:
        """`forward`, with what each layer asks of its attention shown to `witness`.

        State changes, at the first call: hooks on the attention modules of a model that drops our keywords.
        """
        while True:
            try:
                return self._run(token_ids, positions, {"attend": attend, "witness": witness})
            except _KeywordLost as lost:
                self._relay.attach(self._model, lost.kind)

    def own_logits(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] of one sequence -> [T, vocab_size] float32, with the model's own attention and no cache."""
        self._model.set_attn_implementation("eager")
        try:
            logits: Tensor = self._model(input_ids=token_ids[None], use_cache=False).logits[0]
        finally:
            self._model.set_attn_implementation(_ATTENTION)
        return logits.float()

    def _run(self, token_ids: Tensor, positions: Tensor, keywords: dict[str, Any]) -> Tensor:
        with self._relay.carrying(keywords):
            output = self._backbone(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **keywords
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


def load_transformers_decoder(
    folder: Path,
    config: Mapping[str, Any],
    geometry: ModelGeometry,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_model_len: int | None = None,
) -> TransformersDecoder:
    """Load a model folder (config.json, whose content is `config`, and safetensors) and prove that it runs right.

    `max_model_len`: the longest sequence that will run, None = the model's own context. Rotary scalings that depend
    on the length (dynamic NTK, LongRoPE) are fixed for it, as in rope.py.

    Raises UnsupportedModel, with the reason, for whatever cannot run on paged keys and values, and CorruptModel for
    weights that are damaged or do not belong to the config. No code of the folder is ever run.
    """
    name = geometry.architecture
    layout = CacheLayout.of(geometry, PROBE_BLOCK_SIZE)
    try:
        own_config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        reason = f"transformers cannot read its config.json ({_brief(error)})"
        if config.get("auto_map"):
            reason = "transformers has no code for it, and code that comes with a model is never run here"
        raise refusal(name, reason) from error
    _refuse_by_config(name, own_config)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=own_config,
            dtype=dtype,
            attn_implementation=_ATTENTION,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, SafetensorError) as error:
        raise CorruptModel(f"{folder}: the weights of {name} cannot be read ({_brief(error)}); {_AGAIN}") from error
    except Exception as error:
        raise refusal(name, f"transformers cannot build it ({_brief(error)})") from error
    for tensor in sorted(report["missing_keys"]):
        raise CorruptModel(f"{folder}: tensor {tensor} of {name} is missing; {_AGAIN}")
    for tensor, found, asked in sorted(report["mismatched_keys"]):
        raise CorruptModel(
            f"{folder}: tensor {tensor} has shape {list(found)}, config.json asks for {list(asked)}; {_AGAIN}"
        )
    model.eval().to(device)
    longest = max_model_len or geometry.max_position
    try:
        with torch.inference_mode():
            scaled_for = _fix_rotary_scaling(model, longest, device)
            decoder = TransformersDecoder(model, dtype, device, scaled_for)
            probe(decoder, geometry, layout, longest)
    except (AnaphoraError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise refusal(name, f"its code in transformers fails on a first prompt ({_brief(error)})") from error
    return decoder


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _refuse_by_config(name: str, config: Any) -> None:
    """Refuse what the class alone shows, before the weights are read."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refusal(name, f"transformers has no causal language model for model_type {config.model_type!r}")
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise refusal(name, "it attends to an encoder's output")
    if not MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._can_set_attn_implementation():
        raise refusal(name, "its code in transformers does not go through the attention interface")


def _fix_rotary_scaling(model: nn.Module, longest: int | None, device: torch.device) -> int | None:
    """Let the longest sequence, not the longest of a batch, decide the frequencies. State changes: rotary modules.

    -> `longest` if there was any such module.
    """
    scaled_for = None
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if longest is None or not isinstance(kind, str) or not (kind == "longrope" or "dynamic" in kind):
                continue
            which = {} if layer_type is None else {"layer_type": layer_type}
            module(torch.zeros(1, device=device), torch.tensor([[longest - 1]], device=device), **which)
            if isinstance(kinds, dict):
                kinds[layer_type] = "fixed"
            else:
                module.rope_type = "fixed"
            scaled_for = longest
    return scaled_for
