"""The config file of `anaphora serve MODEL --config FILE`."""

from __future__ import annotations

from anaphora.geometry.units import human_bytes
from anaphora.planning.anaphora_pool import batched_tokens
from anaphora.planning.emit.render import header, yaml_lines
from anaphora.planning.emit.target import Line
from anaphora.planning.protocol import EngineSettings
from anaphora.planning.settings import PlanSettings


class AnaphoraYaml:
    """`anaphora serve MODEL --config FILE`."""

    name = "anaphora"
    engine = "anaphora"

    def render(self, settings: PlanSettings) -> str:
        top = header(settings, "anaphora serve", f"Use: anaphora serve {settings.model} --config THIS_FILE.yaml")
        return top + "\n" + yaml_lines(anaphora_lines(settings))


def anaphora_lines(plan: PlanSettings) -> list[Line]:
    """Options by their names in the config file."""
    why = plan.why
    asked = EngineSettings(plan.max_model_len, max_num_batched_tokens=plan.max_num_batched_tokens, device=_device(plan))
    batch = max(batched_tokens(asked), plan.max_num_seqs)
    dtype = "float32" if plan.dtype_bytes == 4 else plan.dtype or "auto"
    return [
        Line("dtype", dtype, "four bytes a number, as planned" if plan.dtype_bytes == 4 else why["dtype"]),
        Line("device", _device(plan), f"the plan is for {plan.hardware}"),
        Line("max-model-len", plan.max_model_len, why["max_model_len"]),
        Line("max-num-seqs", plan.max_num_seqs, why["max_num_seqs"]),
        Line("max-num-batched-tokens", batch, "tokens of one step, at least one for each request"),
        *_kv_dtype(plan),
        Line("block-size", plan.block_size, "prefixes are reused to the token, whatever the block"),
        Line("kv-memory", plan.pool_bytes, f"{human_bytes(plan.pool_bytes)}: {plan.num_blocks:,} blocks"),
        Line("enable-prefix-caching", plan.enable_prefix_caching, "reuse of shared prefixes"),
    ]


def _kv_dtype(plan: PlanSettings) -> list[Line]:
    name = plan.kv_cache_dtype
    return [] if name == "auto" else [Line("kv-cache-dtype", name, "as planned; measure it with anaphora quality")]


def _device(plan: PlanSettings) -> str:
    return "cpu" if plan.device_kind == "cpu" else "cuda"
