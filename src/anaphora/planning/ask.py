"""From what a user types to a Question with nothing left open; every impossible wish is refused with what would do."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from anaphora.errors import ConfigError
from anaphora.geometry.model import ModelGeometry
from anaphora.planning.anaphora_pool import keeps_bfloat16
from anaphora.planning.capability import compute_capability, engine_device
from anaphora.planning.engines import Engine, find_engine
from anaphora.planning.hardware import Device, find_device
from anaphora.planning.overhead import Situation
from anaphora.planning.overhead_vllm import default_batch
from anaphora.planning.plan import Question, check_context, model_limit
from anaphora.planning.protocol import EngineSettings
from anaphora.planning.workload import Workload

_DTYPES = {"auto": None, "float32": 4, "float": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "half": 2, "fp16": 2}
_DEFAULT_CONTEXT = 8192
_MOST_DEVICES = 4096
_KERNEL_BLOCK = 16
_SCHEME_OF = {"compressed-tensors": None, "auto": None, "none": "bfloat16"}
"""What users write for "the checkpoint's own" and "not at all"."""
_KEEP_FLOAT32 = ("transformers", "anaphora")
"""The other engines load a float32 checkpoint in 16 bits unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """As typed; None = choose for me."""

    hardware: str | None = None
    count: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int = 1
    context: int | None = None
    concurrency: int = 1
    shared_prefix: int = 0
    engine: str | None = None
    engine_version: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    kv_dtype: str = "auto"
    utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    allow_long: bool = False


def ask(model: str, geometry: ModelGeometry, wishes: Wishes) -> tuple[Question, list[str]]:
    """(the question, remarks on what was chosen). Raises ConfigError, HardwareNotFound."""
    remarks: list[str] = []
    wishes = _one_replica(wishes, remarks)
    device, count, free = _hardware(wishes, remarks)
    engine = find_engine(wishes.engine) if wishes.engine else _default_engine(model, device)
    count, tp, pp = _ranks(engine, wishes, count)
    if pp > len(geometry.layers):
        raise ConfigError(f"--pp {pp}: the model has {len(geometry.layers)} layers, and each stage needs one at least")
    limit = model_limit(geometry)
    if wishes.context is not None and not wishes.allow_long:
        check_context(geometry, wishes.context)
    elif wishes.context is not None and geometry.max_position is not None and wishes.context > geometry.max_position:
        remarks.append(
            f"{wishes.context:,} tokens are beyond this model's limit of {geometry.max_position:,} "
            f"({geometry.max_position_from}): answers may be nonsense there, and engines refuse it unless told"
        )
    context = min(limit or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT) if wishes.context is None else wishes.context
    if wishes.context is None:
        remarks.append(f"--context was left out: {context:,} tokens assumed")
    workload = Workload(context, wishes.concurrency, wishes.shared_prefix)
    if wishes.utilization is not None and not 0 < wishes.utilization <= 1:
        percent = 1 < wishes.utilization <= 100
        near = f"; for {wishes.utilization:g}% write {wishes.utilization / 100:g}" if percent else ""
        raise ConfigError(
            f"--utilization is {wishes.utilization:g}; it is a part of the memory, above 0 and at most 1{near}"
        )
    version = _version(wishes.engine_version)
    if engine.name == "vllm" and (wishes.block_size or _KERNEL_BLOCK) % _KERNEL_BLOCK:
        raise ConfigError(f"--block-size is {wishes.block_size}; vLLM's kernels take multiples of {_KERNEL_BLOCK}")
    width, quantization = _weights(geometry, wishes, engine, device)
    settings = EngineSettings(
        max_model_len=context,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        kv_cache_dtype=_kv_dtype(geometry, wishes, engine, remarks),
        model_dtype_bytes=width,
        block_size=wishes.block_size,
        max_num_seqs=wishes.concurrency if wishes.max_num_seqs is None else wishes.max_num_seqs,
        max_num_batched_tokens=wishes.max_num_batched_tokens,
        device=engine_device(device),
        compute_capability=compute_capability(device),
        device_memory_bytes=device.memory_bytes or 0,
    )
    if engine.name == "vllm" and settings.max_num_batched_tokens is None:
        settings = replace(settings, max_num_batched_tokens=default_batch(settings, version))
    if settings.max_num_seqs is not None and settings.max_num_seqs < wishes.concurrency:
        remarks.append(
            f"--max-num-seqs {settings.max_num_seqs:,} is less than --concurrency {wishes.concurrency:,}: the engine "
            f"runs {settings.max_num_seqs:,} at once and the others wait, whatever memory is left"
        )
    if geometry.assumed_full_attention:
        remarks.append(f"{geometry.architecture} is not known: every layer is sized as full attention, as asked")
    situation = Situation(geometry, device, settings, count, wishes.utilization, quantization, version, free_bytes=free)
    return Question(model, engine, situation, workload), remarks


def _one_replica(wishes: Wishes, remarks: list[str]) -> Wishes:
    """Data parallelism: replicas with weights and KV of their own share the requests; one of them is planned."""
    if wishes.dp < 1:
        raise ConfigError(f"--dp is {wishes.dp}; give a positive whole number")
    if wishes.dp == 1:
        return wishes
    share = -(-wishes.concurrency // wishes.dp)
    remarks.append(
        f"--dp {wishes.dp}: planned is one of {wishes.dp} replicas, with {share:,} of the {wishes.concurrency:,} "
        "requests, on devices of its own with whole weights (experts are not spread). A prefix is warm only on the "
        f"replica that computed it. In vLLM: --data-parallel-size {wishes.dp}"
    )
    return replace(wishes, concurrency=share, dp=1)


def _hardware(wishes: Wishes, remarks: list[str]) -> tuple[Device, int, int | None]:
    """(device, how many, free bytes where known)."""
    for name in ("count", "tp", "pp"):
        value = getattr(wishes, name)
        if value is not None and not 1 <= value <= _MOST_DEVICES:
            raise ConfigError(f"--{name} is {value}; give a whole number from 1 to {_MOST_DEVICES:,}")
    asked = wishes.count or (wishes.tp or 1) * (wishes.pp or 1)
    if wishes.hardware is not None:
        return find_device(wishes.hardware), asked, None
    from anaphora.planning import machine  # ctypes and platform, only when this machine is asked for

    here = machine.this_machine()
    if not here.gpus or wishes.engine == "anaphora":
        remarks.append("no --hardware: planned for this machine")
        return here.cpu, asked, here.free_bytes
    same = [gpu for gpu in here.gpus if gpu.name == here.gpus[0].name]
    count = wishes.count or (asked if wishes.tp or wishes.pp else len(same))
    if count > len(same):
        raise ConfigError(
            f"--count {count}: this machine has {len(same)} x {same[0].name}; name others with --hardware"
        )
    used = (same[0].memory_bytes or 0) - here.gpu_free[0]
    remarks.append(f"no --hardware: planned for this machine's {len(same)} x {same[0].name}")
    if used > 1 << 30:
        remarks.append(f"{used / 2**30:.1f} GiB of it are in use at the moment; the plan assumes it empty")
    return same[0], count, here.gpu_free[0]


def _default_engine(model: str, device: Device) -> Engine:
    if model.endswith(".gguf") or (device.kind == "unified" and device.vendor != "NVIDIA"):
        return find_engine("llama.cpp")
    return find_engine("anaphora" if device.kind == "cpu" else "vllm")


def _ranks(engine: Engine, wishes: Wishes, count: int) -> tuple[int, int, int]:
    """(devices, tensor parallel, pipeline parallel)."""
    if not engine.splits_tensors:
        if (wishes.tp or 1) > 1 or (wishes.pp or 1) > 1:
            raise ConfigError(f"{engine.name} has no --tp or --pp; give --count, or plan --engine vllm")
        return count, 1, 1
    pp = wishes.pp or 1
    tp = wishes.tp or max(1, count // pp)
    if tp * pp != count:
        raise ConfigError(
            f"--count {count} does not match --tp {tp} x --pp {pp} = {tp * pp} devices. Leave out --count, or plan one "
            "replica and start several"
        )
    return count, tp, pp


def _version(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.match(r"v?(\d+)\.(\d+)", text)
    if found is None:
        raise ConfigError(f"--engine-version {text!r} is not a version; write for example 0.11")
    return int(found[1]), int(found[2])


def _weights(geometry: ModelGeometry, wishes: Wishes, engine: Engine, device: Device) -> tuple[int, str | None]:
    """(bytes of a number in the model's dtype, scheme of the weights or None for the checkpoint's own)."""
    if wishes.dtype not in _DTYPES:
        raise ConfigError(f"--dtype is {wishes.dtype!r}; choose one of {', '.join(_DTYPES)}")
    width, own = _DTYPES[wishes.dtype], geometry.quantization
    quantization = _SCHEME_OF.get(wishes.quantization or "", wishes.quantization)
    if quantization is not None:
        geometry.weight_bytes(quantization)  # refuses an unknown scheme by name
    if width is None:
        wide = own is not None and own.rest == 32
        if wide and quantization is None and engine.name not in _KEEP_FLOAT32:
            quantization = "bfloat16"
        slow = engine.name == "anaphora" and device.kind == "cpu" and "bf16" not in device.flops
        slow = slow and not keeps_bfloat16(geometry, wishes.block_size)
        width = 4 if slow or (wide and engine.name in _KEEP_FLOAT32) else 2
    elif width == 4 and quantization is None and not (own and own.rest == 32):
        quantization = "float32"
    return width, quantization


def _kv_dtype(geometry: ModelGeometry, wishes: Wishes, engine: Engine, remarks: list[str]) -> str:
    asked = wishes.kv_dtype.lower()
    if asked == "auto" and engine.name == "vllm" and geometry.checkpoint_kv_dtype == "fp8":
        remarks.append(
            "the checkpoint brings scales for an fp8 KV cache, so `auto` is fp8; --kv-dtype bfloat16 undoes it"
        )
        return "fp8"
    return dict(engine.kv_names).get(asked, asked)
