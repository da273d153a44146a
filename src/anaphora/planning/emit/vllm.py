"""vLLM 0.32 and 0.33: the config file of `vllm serve --config`, and the same as flags.

The names were parsed by vLLM's own argument parser (tools/check_emitted.py).
"""

from __future__ import annotations

from anaphora.geometry.units import human_bytes
from anaphora.planning.emit.render import command, header, yaml_lines
from anaphora.planning.emit.target import Line
from anaphora.planning.settings import PlanSettings

MADE_FOR = "vLLM 0.32 and 0.33"
_LONGEST_BLOCK = 256
_ONLINE = {"fp8"}
"""Schemes vLLM applies itself while it loads; the others need a checkpoint that has them."""
GIB = 2**30


def vllm_lines(plan: PlanSettings) -> list[Line]:
    """Options by their names in the config file; `--` in front makes them flags."""
    why = plan.why
    lines = [
        Line("dtype", plan.dtype or "auto", why["dtype"]),
        Line("max-model-len", plan.max_model_len, why["max_model_len"]),
        Line("max-num-seqs", plan.max_num_seqs, why["max_num_seqs"]),
    ]
    if plan.share is not None:
        lines.append(Line("gpu-memory-utilization", plan.share, why["share"]))
    if plan.max_num_batched_tokens is not None:
        lines.append(Line("max-num-batched-tokens", plan.max_num_batched_tokens, why["max_num_batched_tokens"]))
    lines.append(
        Line("block-size", plan.block_size, why["block_size"])
        if plan.block_size <= _LONGEST_BLOCK
        else Line("block-size", None, f"vLLM raises it to {plan.block_size:,} for this model: {why['block_size']}")
    )
    lines.append(
        Line("enable-prefix-caching", True, "on by default; named so that nobody has to guess")
        if plan.enable_prefix_caching
        else Line("enable-prefix-caching", False, "off, as asked")
    )
    if plan.kv_cache_dtype != "auto":
        lines.append(Line("kv-cache-dtype", plan.kv_cache_dtype, why["kv_cache_dtype"]))
    lines += _weights(plan)
    for key, name in (
        ("tensor-parallel-size", "tensor_parallel_size"),
        ("pipeline-parallel-size", "pipeline_parallel_size"),
    ):
        value = getattr(plan, name)
        if value > 1:
            lines.append(Line(key, value, why[name]))
    gone = "swap_space is gone since vLLM 0.18 and this took its place: host memory for blocks that leave the GPU"
    if plan.kv_offload_bytes:
        size = round(plan.kv_offload_bytes / GIB, 3)
        lines.append(Line("kv-offloading-size", size, f"GiB over all ranks. {gone}"))
    else:
        lines.append(Line("kv-offloading-size", None, f"{gone}. Off; cpu-offload-gb moves weights, not KV"))
    lines.append(
        Line(
            "num-gpu-blocks-override",
            None,
            f"left to vLLM: about {plan.num_blocks:,} blocks ({human_bytes(plan.pool_bytes)}) are expected",
        )
    )
    lines.append(Line("enable-prompt-tokens-details", True, "answers say how many prompt tokens came from the cache"))
    return lines


def _weights(plan: PlanSettings) -> list[Line]:
    if plan.quantization in _ONLINE:
        return [Line("quantization", plan.quantization, "weights are quantised while they are loaded")]
    if plan.quantization:
        text = f"vLLM reads it from the checkpoint: give one with {plan.quantization} weights as the model"
        return [Line("quantization", None, text)]
    return []


class VllmYaml:
    """`vllm serve --config FILE`."""

    name = "vllm-yaml"
    engine = "vllm"

    def render(self, settings: PlanSettings) -> str:
        words = " ".join([*allowed(settings), "vllm serve --config THIS_FILE.yaml"])
        top = header(settings, MADE_FOR, f"Use: {words}")
        model = Line("model", settings.model, "a name of the Hub, or a folder")
        return top + "\n" + yaml_lines([model, *vllm_lines(settings)])


class VllmCli:
    """`vllm serve MODEL --flags`."""

    name = "vllm-cli"
    engine = "vllm"

    def render(self, settings: PlanSettings) -> str:
        top = header(settings, MADE_FOR, "Use: paste into a shell")
        return top + "#\n" + command([*allowed(settings), "vllm", "serve", settings.model], vllm_flags(settings))


def allowed(plan: PlanSettings) -> list[str]:
    """The variable without which vLLM refuses a context beyond the model's own limit, where there is one."""
    return ["VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"] if plan.beyond_limit else []


def vllm_flags(plan: PlanSettings) -> list[Line]:
    """The options as flags; what a config file says with false has a flag of its own."""
    return [
        Line("--no-enable-prefix-caching", True, line.why)
        if line.key == "enable-prefix-caching" and line.value is False
        else Line(f"--{line.key}", line.value, line.why)
        for line in vllm_lines(plan)
    ]
