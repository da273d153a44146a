"""SGLang 0.5.23: flags of `sglang serve`, checked against its own argument parser (tools/check_emitted.py)."""

from __future__ import annotations

from anaphora.planning.emit.render import command, header
from anaphora.planning.emit.target import Line
from anaphora.planning.settings import PlanSettings

_KV_DTYPES = {"float16": "auto", "fp8": "fp8_e4m3"}
"""SGLang's names where they are others; float16 it has only as the model's own."""
_GB = 2**30


class Sglang:
    """`sglang serve --model-path MODEL`."""

    name = "sglang"
    engine = "sglang"

    def render(self, settings: PlanSettings) -> str:
        top = header(settings, "SGLang 0.5.23", "Use: paste into a shell")
        allowed = ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"] if settings.beyond_limit else []
        words = [*allowed, "sglang", "serve", "--model-path", settings.model]
        return top + "#\n" + command(words, sglang_lines(settings))


def sglang_lines(plan: PlanSettings) -> list[Line]:
    """Flags in the order people read them."""
    why = plan.why
    lines = [
        Line("--dtype", plan.dtype or "auto", why["dtype"]),
        Line("--context-length", plan.max_model_len, why["max_model_len"]),
        Line("--max-running-requests", plan.max_num_seqs, why["max_num_seqs"]),
    ]
    if plan.share is not None:
        text = f"weights and KV together. {why['share']}"
        lines.append(Line("--mem-fraction-static", plan.share, text))
    lines.append(Line("--page-size", plan.block_size, why["block_size"]))
    if plan.max_num_batched_tokens is not None:
        lines.append(Line("--chunked-prefill-size", plan.max_num_batched_tokens, why["max_num_batched_tokens"]))
    kv_dtype = _KV_DTYPES.get(plan.kv_cache_dtype, plan.kv_cache_dtype)
    if kv_dtype != "auto":
        lines.append(Line("--kv-cache-dtype", kv_dtype, why["kv_cache_dtype"]))
    if plan.quantization:
        text = f"read from the checkpoint: give one with {plan.quantization} weights as the model"
        lines.append(Line("--quantization", None, text))
    if plan.tensor_parallel_size > 1:
        lines.append(Line("--tp-size", plan.tensor_parallel_size, why["tensor_parallel_size"]))
    if plan.pipeline_parallel_size > 1:
        lines.append(Line("--pp-size", plan.pipeline_parallel_size, why["pipeline_parallel_size"]))
    lines.append(
        Line("--enable-radix-cache", None, "does not exist: the radix cache is on; --disable-radix-cache turns it off")
        if plan.enable_prefix_caching
        else Line("--disable-radix-cache", True, "off, as asked")
    )
    if plan.kv_offload_bytes:
        lines.append(Line("--enable-hierarchical-cache", True, "prefixes that leave the GPU stay in host memory"))
        size = max(1, plan.kv_offload_bytes // plan.tensor_parallel_size // _GB)
        lines.append(Line("--hicache-size", size, "GB of host memory for each rank"))
    lines.append(Line("--enable-cache-report", True, "answers say how many prompt tokens came from the cache"))
    lines.append(Line("--enable-metrics", True, "/metrics with hits and usage"))
    return lines
