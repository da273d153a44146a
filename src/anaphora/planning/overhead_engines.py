"""What the engines besides vLLM take before KV, each by its own rule."""

from __future__ import annotations

from anaphora.errors import ConfigError
from anaphora.planning.anaphora_pool import batched_tokens
from anaphora.planning.llama_cpp import DEFAULT_UBATCH
from anaphora.planning.overhead import (
    GIB,
    MIB,
    Budget,
    Estimate,
    Part,
    Situation,
    activation_per_token,
    device_spread,
    has_latent,
    weight_estimate,
)
from anaphora.planning.transformers_cb import DEFAULT_BATCH

_CONTEXT = Estimate(int(0.4 * GIB), int(0.2 * GIB), int(0.7 * GIB), "the CUDA context before anything is loaded")
_FIT_MARGIN = 1024 * MIB
"""llama.cpp's --fit-target: what it leaves free on a device."""


def sglang_budget(situation: Situation) -> Budget:
    """KV = free after the weights - free before them x (1 - mem_fraction_static) (_profile_available_bytes).

    Activations and graphs live in the rest, so they are beside the share. Raises UnsupportedModel.
    """
    share = situation.utilization or default_mem_fraction(situation)
    total = situation.memory_bytes
    batch = _chunk(situation)
    settings = situation.settings
    forward = batch * activation_per_token(
        situation.geometry, settings.tensor_parallel_size, settings.model_dtype_bytes
    )
    allowed = int((total - _CONTEXT.likely) * share)
    libraries = int((0.1 if situation.ranks == 1 else 0.6) * GIB)
    parts = (
        Part("weights", weight_estimate(situation)),
        Part("libraries", Estimate(libraries, 0, libraries + int(0.6 * GIB), "kernels and NCCL")),
        Part("CUDA context", _CONTEXT, inside=False),
        Part(
            "activations",
            Estimate(forward, forward // 2, 2 * forward, f"a prefill chunk of {batch:,} tokens"),
            inside=False,
        ),
    )
    return Budget(total, allowed, f"(memory - context) x {share:g}", parts, device_spread(situation.device))


def default_mem_fraction(situation: Situation) -> float:
    """mem_fraction_static's default: 1.5 GiB and 128 MiB a rank stay free where KV is sized after graph capture;
    with MLA and before, activations and graphs are reserved for (arg_groups/memory_hook.py)."""
    total = situation.memory_bytes / MIB
    reserved = 1536.0
    if has_latent(situation.geometry):
        reserved = 512 + 1.5 * _chunk(situation) + 2 * _graph_batch(situation) + 1536
        if total > 60 * 1024:
            reserved = max(reserved, 10 * 1024)
    return round((total - reserved - situation.ranks / 8 * 1024) / total, 3)


def _chunk(situation: Situation) -> int:
    """chunked_prefill_size, by the device's memory."""
    if situation.settings.max_num_batched_tokens:
        return situation.settings.max_num_batched_tokens
    gib = situation.memory_bytes / GIB
    return next(size for limit, size in ((20, 2048), (60, 4096), (160, 8192), (1e9, 16384)) if gib < limit)


def _graph_batch(situation: Situation) -> int:
    """Largest batch of a decode graph, by the device's memory."""
    gib = situation.memory_bytes / GIB
    return next(size for limit, size in ((20, 8), (35, 48), (60, 32), (160, 256), (1e9, 512)) if gib < limit)


def llama_cpp_budget(situation: Situation) -> Budget:
    """All devices together: layers are split over them. Leaves 1 GiB a device free, as --fit does.

    The compute buffer is a micro-batch of logits and hidden states in float32: 307 MiB for Qwen2.5-14B, 398 for
    gpt-oss-20b, 517 for Gemma-4-E4B in public logs, to the MiB. Without flash attention the scores come on top.
    Raises UnsupportedModel.
    """
    geometry = situation.geometry
    total = situation.memory_bytes * situation.devices
    share = situation.utilization
    margin = _FIT_MARGIN * situation.devices
    allowed = int(total * share) if share else total - margin
    ubatch = situation.settings.max_num_batched_tokens or DEFAULT_UBATCH
    compute = ubatch * (geometry.vocab_size + geometry.hidden_size) * 4
    parts = [
        Part("weights", weight_estimate(situation)),
        Part(
            "compute buffer",
            Estimate(compute, compute, 2 * compute, f"{ubatch} x (vocabulary + hidden) x 4 bytes; scores without -fa"),
        ),
    ]
    if situation.device.kind == "gpu":
        context = _CONTEXT.likely * situation.devices
        parts.append(Part("CUDA context", Estimate(context, context // 2, 2 * context, _CONTEXT.source)))
    rule = f"memory x {share:g}" if share else "memory less 1 GiB a device"
    return Budget(total, allowed, rule, tuple(parts), device_spread(situation.device))


def transformers_budget(situation: Situation) -> Budget:
    """(total - weights) x max_memory_percent (0.9, on a CPU 0.6), less what a batch takes. Raises UnsupportedModel."""
    geometry, settings = situation.geometry, situation.settings
    cpu = settings.device == "cpu"
    share = situation.utilization or (0.6 if cpu else 0.9)
    weights = weight_estimate(situation)
    total = situation.memory_bytes
    left_alone = int(max(0, total - weights.likely) * (1 - share))
    batch = settings.max_num_batched_tokens or DEFAULT_BATCH
    rows = min(settings.max_num_seqs or 1024, batch)
    width = settings.model_dtype_bytes
    logits = rows * (geometry.hidden_size * width + geometry.vocab_size * 4)
    forward = batch * activation_per_token(geometry, settings.tensor_parallel_size, width)
    parts = (
        Part("weights", weights),
        Part("logits", Estimate.exact(logits, f"{rows:,} rows in float32, as its own planner reserves")),
        Part("batch", Estimate(forward, forward // 4, 2 * forward, f"a batch of {batch:,} tokens")),
        Part("CUDA context", Estimate.exact(0, "none on a CPU") if cpu else _CONTEXT),
    )
    rule = f"weights + rest x {share:g}"
    return Budget(total, total - left_alone, rule, parts, device_spread(situation.device))


def anaphora_budget(situation: Situation) -> Budget:
    """Half of what the weights leave free, or the share asked for; `anaphora serve --kv-memory` says it in bytes.

    Raises UnsupportedModel; ConfigError for several devices.
    """
    if situation.devices > 1:
        raise ConfigError("anaphora runs on one device; plan --count 1, or another engine such as --engine vllm")
    settings = situation.settings
    free = situation.free_bytes if situation.free_bytes is not None else situation.memory_bytes
    weights = anaphora_weights(situation)
    left = free - weights
    share = situation.utilization
    kv = (left // 2 if left > 0 else left) if share is None else int(free * share) - weights
    forward = batched_tokens(settings) * activation_per_token(situation.geometry, 1, settings.model_dtype_bytes)
    parts = (
        Part("weights", Estimate.exact(weights, "parameters x bytes of the dtype")),
        Part("activations", Estimate(forward, forward // 4, 3 * forward, "one step's batch"), inside=False),
    )
    rule = "half of what the weights leave" if share is None else f"free memory x {share:g}"
    return Budget(situation.memory_bytes, kv + weights, rule, parts)


def anaphora_weights(situation: Situation) -> int:
    """Every tensor in the dtype that runs. Raises UnsupportedModel."""
    geometry = situation.geometry
    if geometry.parameters is None:
        return weight_estimate(situation).likely
    return geometry.parameters.total * situation.settings.model_dtype_bytes
