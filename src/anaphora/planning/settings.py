"""From an answered plan to the values of a configuration file: what does not fit is corrected, and said."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.errors import ConfigError
from anaphora.geometry.units import human_bytes
from anaphora.planning.plan import Answer, answer, longest_context
from anaphora.planning.recommend import recommend

_STEP = 256
"""A context that had to be shortened is rounded down to this."""
_NO_BFLOAT16 = 80
"""Compute capability from which GPUs have it."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Nothing left open, by vLLM's names. `why` has a sentence for each value, by field name."""

    model: str
    engine: str
    hardware: str
    device_kind: str
    devices: int
    dtype: str | None
    """None: the checkpoint's own."""
    dtype_bytes: int
    quantization: str | None
    """Scheme of weights that are not the checkpoint's own."""
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    share: float | None
    """gpu_memory_utilization, mem_fraction_static; None where the engine has no such thing."""
    block_size: int
    max_num_batched_tokens: int | None
    enable_prefix_caching: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    kv_offload_bytes: int | None
    """Host memory for blocks that leave the device."""
    pool_bytes: int
    """Whole blocks of KV that the plan expects."""
    num_blocks: int
    beyond_limit: bool
    """max_model_len is more than the model's own limit."""
    why: dict[str, str]
    verdict: str
    corrections: tuple[str, ...] = ()
    """What was asked and would not fit, and what is set in its place."""


def settings_of(
    found: Answer,
    *,
    dtype: str = "auto",
    enable_prefix_caching: bool = True,
    kv_offload_bytes: int | None = None,
) -> PlanSettings:
    """The settings for a plan. Raises ConfigError where no value would let the engine start."""
    asked = found.question.workload
    corrected, corrections = _corrected(found)
    question, settings = corrected.question, corrected.question.settings
    device, situation = question.situation.device, question.situation
    recommended = {item.name: item for item in recommend(question, corrected)}
    why = {name: item.why for name, item in recommended.items()}
    if corrections:
        why["max_num_seqs"] = f"asked: {asked.concurrency}. {_pieces(corrected)}"
    if question.workload.context != asked.context:
        why["max_model_len"] = f"asked: {asked.context:,}. The longest request that fits beside the weights"
    share_name = question.engine.share_name
    share = recommended.get(share_name)
    length = int(recommended["max_model_len"].value)
    batch = settings.max_num_batched_tokens
    chosen, why["dtype"] = _dtype(found, dtype)
    why |= {
        "share": share.why if share else "",
        "block_size": _block_why(corrected),
        "kv_cache_dtype": f"{human_bytes(corrected.capacity.request_bytes)} for one request of "
        f"{question.workload.context:,} tokens",
        "max_num_batched_tokens": "tokens of one step; its activations were taken off the memory for KV",
        "tensor_parallel_size": f"weights and KV heads over {settings.tensor_parallel_size} devices",
        "pipeline_parallel_size": f"layers in {settings.pipeline_parallel_size} stages",
    }
    count, name = situation.devices, device.name
    return PlanSettings(
        model=question.model,
        engine=question.engine.name,
        hardware=f"{count} x {name} ({human_bytes(device.memory_bytes or 0)})",
        device_kind=device.kind,
        devices=count,
        dtype=chosen,
        dtype_bytes=settings.model_dtype_bytes,
        quantization=situation.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_model_len=length,
        max_num_seqs=question.workload.concurrency,
        share=float(share.value) if share else None,
        block_size=corrected.capacity.block_size,
        max_num_batched_tokens=batch,
        enable_prefix_caching=enable_prefix_caching,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        kv_offload_bytes=kv_offload_bytes,
        pool_bytes=corrected.capacity.num_blocks * corrected.capacity.block_bytes,
        num_blocks=corrected.capacity.num_blocks,
        beyond_limit=question.geometry.max_position is not None and length > question.geometry.max_position,
        why=why,
        verdict=_pieces(corrected),
        corrections=tuple(corrections),
    )


def _corrected(found: Answer) -> tuple[Answer, list[str]]:
    """The answer for what does fit, and what was changed for it."""
    question = found.question
    context, wanted = question.workload.context, question.workload.concurrency
    if found.fits:
        return found, []
    if not found.weights_fit:
        short = human_bytes(-found.budget.available.likely)
        raise ConfigError(
            f"there is nothing to write for {question.engine.name}: without any KV the memory is short of {short}. "
            "Run the plan without --emit for the ways out (quantised weights, more devices)"
        )
    needed, free = human_bytes(found.needed_bytes), human_bytes(found.available_bytes)
    text = f"{wanted} x {context:,} tokens need {needed} of KV; {free} are left for it"
    if found.requests:
        fewer = answer(question.changed(concurrency=found.requests))
        longest = longest_context(question)
        instead = f"max_num_seqs is {found.requests}, not {wanted}: more would not fit at full length"
        other = f"All {wanted} fit with max_model_len {longest:,}. " if longest >= _STEP else ""
        return fewer, [f"{text}, so {instead}. {other}Shorter requests leave room for more at once"]
    longest = longest_context(question, 1)
    longest = longest // _STEP * _STEP if longest >= _STEP else longest
    if longest == 0:
        raise ConfigError(
            f"there is nothing to write for {question.engine.name}: {free} are left for KV, too little for one block. "
            "Run the plan without --emit for the ways out"
        )
    prefix = min(question.workload.shared_prefix, longest - 1)
    shorter = answer(question.changed(context=longest, concurrency=1, shared_prefix=prefix))
    return shorter, [f"{text}, not enough for one, so max_model_len is {longest:,} and max_num_seqs 1"]


def _pieces(found: Answer) -> str:
    workload = found.question.workload
    return (
        f"{found.requests:,} requests of {workload.context:,} tokens fit at once "
        f"({human_bytes(found.capacity.request_bytes)} each, {human_bytes(found.available_bytes)} for KV)"
    )


def _block_why(found: Answer) -> str:
    step = found.capacity.reuse_step
    if not step:
        return "prefixes are not reused for this model"
    return f"prefixes are reused in steps of {step:,} token{'s' if step > 1 else ''}; a shorter one never is"


def _dtype(found: Answer, asked: str) -> tuple[str | None, str]:
    """(dtype to write, why). GPUs before Ampere have no bfloat16 and engines refuse to start in it."""
    names = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"}
    settings, own = found.question.settings, found.question.geometry.quantization
    if asked != "auto":
        return names.get(asked, asked), "as asked"
    stored = own.name if own else "bfloat16"
    if settings.device == "cuda" and settings.compute_capability < _NO_BFLOAT16 and stored != "float16":
        return "float16", "this GPU has no bfloat16"
    return None, f"the checkpoint's own ({stored})"
