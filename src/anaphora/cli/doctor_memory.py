"""A vLLM or SGLang start against the memory of a device: weights, one request, all requests at once."""

from __future__ import annotations

from dataclasses import replace

from anaphora.errors import AnaphoraError
from anaphora.geometry.find import find_geometry
from anaphora.geometry.model import ModelGeometry
from anaphora.planning.hardware import find_device
from anaphora.probes.doctor.engine_line import Launch
from anaphora.probes.doctor.finding import Finding
from anaphora.probes.doctor.log_effects import gib, whole_blocks
from anaphora.probes.doctor.sayings import say
from anaphora.probes.doctor.source import Source

_SHARES = {"vllm": 0.92, "sglang": 0.88}
_ONE_BYTE = ("fp8", "int8", "mxfp8")


def check_memory(source: Source, launch: Launch, gpu: str | None) -> tuple[list[Finding], list[str]]:
    """(findings, notes); nothing where the model is not known offline. Raises HardwareNotFound for an unknown device.

    KV bytes are exact, what is left beside the weights is an upper bound: activations and graphs take some of it.
    """
    context = launch.number("max-model-len", "context-length")
    seqs = launch.number("max-num-seqs", "max-running-requests") or 1
    if launch.model_name is None or context is None or context < 1 or seqs < 1:
        return [], []
    try:
        geometry = find_geometry(launch.model_name)
        weights = geometry.weight_bytes(_quantization(launch))
    except AnaphoraError:
        return [], []
    if not weights:
        return [], []
    kv_bytes = 1 if _text(launch, "kv-cache-dtype").startswith(_ONE_BYTE) else 2
    one = geometry.sequence_bytes(int(context), kv_bytes)
    note = (
        f"{source.path.name}: {int(seqs)} x {int(context):,} tokens of {launch.model_name} take "
        f"{gib(one * seqs)} of KV ({one * int(seqs):,} bytes), weights {gib(weights)}"
    )
    if gpu is None:
        return [], [f"{note}; --gpu NAME checks that against its memory"]
    device = find_device(gpu)
    if device.memory_bytes is None:
        return [], [f"{note}; the memory of {device.name} depends on the machine"]
    found = _fit(geometry, launch, int(context), int(seqs), kv_bytes, weights, device.memory_bytes)
    option = launch.get("max-num-seqs", "max-running-requests", "max-model-len", "context-length")
    line = option.line if option else launch.line
    return [replace(finding, file=str(source.path), line=line) for finding in found], [note]


def _fit(
    geometry: ModelGeometry, launch: Launch, context: int, seqs: int, kv_bytes: int, weights: int, memory: int
) -> list[Finding]:
    devices = int(launch.number("tensor-parallel-size", "tp-size", "-tp") or 1)
    devices *= int(launch.number("pipeline-parallel-size", "pp-size", "-pp") or 1)
    share = launch.number("gpu-memory-utilization", "mem-fraction-static") or _SHARES[launch.engine]
    usable = memory * share * devices
    left, one = usable - weights, geometry.sequence_bytes(context, kv_bytes)
    if left <= 0:
        size = gib(memory * devices)
        return [say("memory.weights", model=launch.model_name, weights=gib(weights), usable=gib(usable), memory=size)]
    values: dict[str, object] = {
        "context": context,
        "one": gib(one),
        "left": gib(left),
        "seqs": seqs,
        "all": gib(one * seqs),
    }
    if one > left:
        return [say("memory.one", **values, fits=_longest(geometry, left, context, kv_bytes))]
    if one * seqs > left:
        fits = _longest(geometry, left / seqs, context, kv_bytes)
        return [say("memory.all", **values, fits_seqs=int(left // one), fits=fits)]
    return []


def _longest(geometry: ModelGeometry, amount: float, context: int, kv_bytes: int) -> int:
    """Tokens of the longest request whose KV fits into `amount` bytes, in whole blocks."""
    low, high = 0, context
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if geometry.sequence_bytes(middle, kv_bytes) <= amount else (low, middle - 1)
    return whole_blocks(low)


def _quantization(launch: Launch) -> str | None:
    name = _text(launch, "quantization")
    return name if name in ("fp8", "awq", "gptq") else None


def _text(launch: Launch, name: str) -> str:
    option = launch.get(name)
    return (option.value or "").lower() if option else ""
