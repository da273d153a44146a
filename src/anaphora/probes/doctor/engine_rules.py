"""Values that contradict each other, per engine."""

from __future__ import annotations

from collections.abc import Callable

from anaphora.probes.doctor.engine_line import Launch
from anaphora.probes.doctor.source import Source

Rule = Callable[[Source, Launch], None]

_DEFAULT_BLOCK = 16
_GRAPHS_NEED = 0.97
"""Above this share of the memory, capturing CUDA graphs runs out of it (vllm-project/vllm#57475)."""
_PORTS = {"vllm": 8000, "sglang": 30000, "llama_server": 8080}


def utilization(source: Source, launch: Launch) -> None:
    """The share of the GPU's memory."""
    option = launch.get("gpu-memory-utilization", "device-memory-utilization", "mem-fraction-static")
    share = launch.number("gpu-memory-utilization", "device-memory-utilization", "mem-fraction-static")
    if option is None or share is None:
        return
    if not 0 < share <= 1:
        right = f"{share / 100:g}" if 1 < share <= 100 else "0.9"
        edit = source.edit(option.line, option.value or "", right)
        source.say("option.share", option.line, edit=edit, option=option.flag, value=option.value, right=right)
    elif share > _GRAPHS_NEED:
        edit = source.edit(option.line, option.value or "", f"{_GRAPHS_NEED:g}")
        source.say(
            "option.share-high", option.line, edit=edit, option=option.flag, value=option.value, right=_GRAPHS_NEED
        )


def batch(source: Source, launch: Launch) -> None:
    """vLLM: the tokens of a step against requests and context."""
    tokens, seqs = launch.number("max-num-batched-tokens"), launch.number("max-num-seqs")
    context, option = launch.number("max-model-len"), launch.get("max-num-batched-tokens")
    if option is None or tokens is None:
        return
    if seqs is not None and tokens < seqs:
        source.say("rule.batch-seqs", option.line, tokens=int(tokens), seqs=int(seqs))
    chunked = launch.get("no-enable-chunked-prefill") is not None or _says(launch, "enable-chunked-prefill", "false")
    if chunked and context is not None and tokens < context:
        source.say("rule.batch-context", option.line, tokens=int(tokens), context=int(context))


def blocks(source: Source, launch: Launch) -> None:
    """vLLM: a pool set by hand that not even one request fits into."""
    option, count = launch.get("num-gpu-blocks-override"), launch.number("num-gpu-blocks-override")
    context = launch.number("max-model-len")
    if option is None or count is None or context is None:
        return
    size = launch.number("block-size") or _DEFAULT_BLOCK
    if count * size < context:
        source.say("rule.blocks", option.line, blocks=int(count), size=int(size), tokens=int(count * size),
                   context=int(context), need=int(-(-context // size)) + 1)  # fmt: skip


def both_memories(source: Source, launch: Launch) -> None:
    """vLLM: bytes and share given together."""
    amount, share = launch.get("kv-cache-memory-bytes", "kv-cache-memory"), launch.get("gpu-memory-utilization")
    if amount is not None and share is not None:
        source.say("rule.two-sizes", share.line, amount=amount.flag, share=share.flag)


def caching_twice(source: Source, launch: Launch) -> None:
    """vLLM: prefix caching on and off."""
    off = launch.get("no-enable-prefix-caching")
    if off is not None and launch.get("enable-prefix-caching") is not None:
        edit = source.edit(off.line, off.whole or "", "")
        source.say("rule.caching-twice", off.line, edit=edit)


def parallel_context(source: Source, launch: Launch) -> None:
    """llama-server: the context is divided among the slots."""
    slots, context = launch.number("parallel"), launch.number("ctx-size")
    option = launch.get("ctx-size")
    if option is None or not slots or not context or slots < 2 or launch.get("kv-unified") is not None:
        return
    source.say("rule.slots", option.line, context=int(context), slots=int(slots), each=int(context // slots),
               total=int(context * slots), flag=option.flag)  # fmt: skip


def quantized_values(source: Source, launch: Launch) -> None:
    """llama-server: quantised values need flash attention."""
    kind, attention = launch.get("cache-type-v"), launch.get("flash-attn")
    whole = {"f32", "f16", "bf16"}
    if kind is None or attention is None or (kind.value or "").lower() in whole:
        return
    if (attention.value or "").lower() in ("off", "0", "false", "disabled"):
        source.say("rule.quantized-values", kind.line, kind=kind.value, attention=f"{attention.flag} {attention.value}")


def bare_flash_attention(source: Source, launch: Launch) -> None:
    """llama-server: -fa takes a value now, and swallows the next word."""
    option = launch.get("flash-attn")
    if option is not None and option.value is None:
        edit = source.edit(option.line, option.flag, f"{option.flag} on", safe=True)
        source.say("rule.flash-bare", option.line, edit=edit, flag=option.flag)


def reachable(source: Source, launch: Launch) -> None:
    """In a container: an address others can reach, and the port that is published."""
    if not launch.contained:
        return
    host = launch.get("host")
    closed = host is None and launch.engine != "vllm"
    if closed or (host is not None and host.value in ("127.0.0.1", "localhost")):
        edit = source.edit(host.line, host.value or "", "0.0.0.0", safe=True) if host else None
        source.say("rule.container-host", host.line if host else launch.line, edit=edit)
    port = int(launch.number("port") or _PORTS[launch.engine])
    inside = [inner for _, inner in launch.ports]
    if inside and port not in inside:
        source.say("rule.container-port", launch.line, inside=", ".join(map(str, inside)), port=port)


def _says(launch: Launch, name: str, value: str) -> bool:
    option = launch.get(name)
    return option is not None and (option.value or "").lower() == value


RULES: dict[str, tuple[Rule, ...]] = {
    "vllm": (utilization, batch, blocks, both_memories, caching_twice, reachable),
    "sglang": (utilization, reachable),
    "llama_server": (parallel_context, quantized_values, bare_flash_attention, reachable),
}
"""Engine -> its rules."""
