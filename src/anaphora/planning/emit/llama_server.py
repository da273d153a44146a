"""llama-server of October 2026: flags, checked against common/arg.cpp (tools/check_emitted.py)."""

from __future__ import annotations

from anaphora.planning.emit.render import command, header
from anaphora.planning.emit.target import Line
from anaphora.planning.llama_cpp import DEFAULT_UBATCH, pad
from anaphora.planning.settings import PlanSettings

_MIB = 2**20
_DEFAULT_CACHE_RAM = 8192


class LlamaServer:
    """`llama-server -m FILE.gguf`."""

    name = "llama-server"
    engine = "llama.cpp"

    def render(self, settings: PlanSettings) -> str:
        top = header(settings, "llama.cpp of October 2026", "Use: paste into a shell, with your GGUF file after -m")
        return top + "#\n" + command(["llama-server", "-m", gguf_file(settings.model)], llama_lines(settings))


def gguf_file(model: str) -> str:
    """The file itself, or a name for the file that is still to be chosen."""
    return model if model.endswith(".gguf") else f"{model.rstrip('/').rpartition('/')[2]}.gguf"


def kv_types(plan: PlanSettings) -> tuple[str, str]:
    """(-ctk, -ctv)."""
    keys, _, values = ("f16" if plan.kv_cache_dtype == "auto" else plan.kv_cache_dtype).partition("/")
    return keys, values or keys


def llama_lines(plan: PlanSettings) -> list[Line]:
    """Flags in the order people read them."""
    slots, cells = plan.max_num_seqs, pad(plan.max_model_len)
    keys, values = kv_types(plan)
    ubatch = plan.max_num_batched_tokens or DEFAULT_UBATCH
    why = plan.why
    lines = [
        Line("-c", slots * cells, f"the sum over the slots: {slots} x {cells:,} tokens, all allotted at start"),
        Line("-np", slots, f"slots. {why['max_num_seqs']}"),
        Line("-ngl", "all" if plan.device_kind != "cpu" else 0, "layers on the GPU"),
        Line("-ctk", keys, f"keys. {why['kv_cache_dtype']}"),
        Line("-ctv", values, "values"),
    ]
    if values not in ("f16", "bf16", "f32"):
        lines.append(Line("-fa", "on", "quantised values need flash attention"))
    lines += [
        Line("-ub", ubatch, "tokens of a step; they size the compute buffer"),
        Line("-b", max(2048, ubatch), "tokens handed over at once, at least those of a step"),
    ]
    if plan.enable_prefix_caching:
        ram = plan.kv_offload_bytes // _MIB if plan.kv_offload_bytes else _DEFAULT_CACHE_RAM
        text = "MiB of host memory for whole prompts that left their slot; slots do not share prefixes"
        lines.append(Line("--cache-ram", ram, text))
    else:
        lines.append(Line("--no-cache-prompt", True, "no reuse, as asked"))
        lines.append(Line("--cache-ram", 0, "no copies of prompts in host memory"))
    lines.append(Line("--metrics", True, "/metrics with prompt tokens computed and cached"))
    return lines
