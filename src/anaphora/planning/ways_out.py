"""What to change when a workload does not fit, each change computed, those that are enough first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from anaphora.errors import AnaphoraError
from anaphora.planning.engines import find_engine
from anaphora.planning.hardware import Device, gpus_of
from anaphora.planning.overhead import GIB, is_quantized
from anaphora.planning.plan import Answer, Question, answer, longest_context

_ADA = 89
_MOST_DEVICES = 8
_LEAN_BATCH = 2048


@dataclass(frozen=True, slots=True)
class WayOut:
    """One change and what comes of it."""

    change: str
    settings: dict[str, Any]
    """Options of `anaphora plan` that make the change."""
    answer: Answer
    cost: str
    """What it takes away."""

    @property
    def enough(self) -> bool:
        return self.answer.fits


def ways_out(question: Question) -> list[WayOut]:
    """Changes in the order to try them: those that are enough first, among them those that take away least."""
    found = [
        *_settings(question),
        *_kv_dtypes(question),
        *_weights(question),
        *_together(question),
        *_less_work(question),
        *_more_devices(question),
        *_other_device(question),
        *_other_engine(question),
    ]
    return sorted(found, key=lambda way: not way.enough)


def _try(question: Question, change: str, cost: str, options: dict[str, Any], **changes: Any) -> Iterator[WayOut]:
    """The change where the engine allows it."""
    try:
        yield WayOut(change, options, answer(question.changed(**changes)), cost)
    except AnaphoraError:
        return


def _settings(question: Question) -> Iterator[WayOut]:
    engine, settings = question.engine, question.settings
    share = engine.share(question.situation)
    if engine.name == "vllm" and share is not None and share < 0.95 and settings.device != "cpu":
        cost = "less room for other processes on the card"
        yield from _try(
            question, f"{engine.share_name} {share:g} -> 0.95", cost, {"utilization": 0.95}, utilization=0.95
        )
    batch = settings.max_num_batched_tokens
    if engine.splits_tensors and batch is not None and batch > _LEAN_BATCH:
        change = f"max_num_batched_tokens {batch:,} -> {_LEAN_BATCH:,}"
        options = {"max_num_batched_tokens": _LEAN_BATCH}
        yield from _try(question, change, "longer prompts take more steps", options, **options)


def _kv_dtypes(question: Question) -> Iterator[WayOut]:
    if question.settings.kv_cache_dtype not in ("auto", "float16", "bfloat16", "f16", "bf16"):
        return
    for dtype in question.engine.half_kv:
        cost = "measure quality on your prompts"
        if dtype.startswith("fp8") and question.settings.compute_capability < _ADA:
            cost = "this card has no fp8 arithmetic: slower, and not every backend; measure quality"
        yield from _try(question, f"KV cache in {dtype}", cost, {"kv_dtype": dtype}, kv_cache_dtype=dtype)


def _weights(question: Question) -> Iterator[WayOut]:
    for scheme, text in _schemes(question):
        cost = "another checkpoint, some quality"
        yield from _try(question, f"{text} weights", cost, {"quantization": scheme}, quantization=scheme)


def _schemes(question: Question) -> list[tuple[str, str]]:
    if is_quantized(question.situation) or question.engine.name == "anaphora":
        return []
    if question.engine.name in ("llama.cpp", "ollama"):
        return [("q8_0", "Q8_0"), ("q4_k_m", "Q4_K_M")]
    fp8 = [("fp8", "fp8")] if question.settings.compute_capability >= _ADA else []
    return [*fp8, ("awq", "4-bit (AWQ)")]


def _together(question: Question) -> Iterator[WayOut]:
    schemes, dtypes = _schemes(question), question.engine.half_kv
    if schemes and dtypes:
        scheme, text = schemes[-1]
        options = {"kv_dtype": dtypes[0], "quantization": scheme}
        changes = {"kv_cache_dtype": dtypes[0], "quantization": scheme}
        change, cost = f"KV in {dtypes[0]} and {text} weights", "another checkpoint, some quality: measure it"
        yield from _try(question, change, cost, options, **changes)


def _less_work(question: Question) -> Iterator[WayOut]:
    now = answer(question)
    wanted, context = question.workload.concurrency, question.workload.context
    if 0 < now.requests < wanted:
        few = now.requests
        cost = f"{wanted - few} of {wanted} requests wait"
        yield from _try(
            question,
            f"{few} stream{'s' if few > 1 else ''} instead of {wanted}",
            cost,
            {"concurrency": few},
            concurrency=few,
        )
    longest = longest_context(question)
    if 0 < longest < context:
        prefix = min(question.workload.shared_prefix, longest - 1)
        cost = "longer requests are refused"
        changes = {"context": longest, "shared_prefix": prefix}
        yield from _try(question, f"context {longest:,} instead of {context:,}", cost, {"context": longest}, **changes)


def _more_devices(question: Question) -> Iterator[WayOut]:
    """Twice, four and eight times as many devices until that is enough; with quantised weights where fewer do."""
    if question.engine.name == "anaphora" or question.situation.device.kind == "cpu":
        return
    plain = list(_until_enough(question, "", {}))
    yield from plain
    schemes = _schemes(question)
    if schemes and (len(plain) > 1 or not any(way.enough for way in plain)):
        scheme, text = schemes[-1]
        narrow = question.changed(quantization=scheme)
        fewer = list(_until_enough(narrow, f" with {text} weights", {"quantization": scheme}))
        if fewer and fewer[-1].enough and (len(fewer) < len(plain) or not plain[-1].enough):
            yield fewer[-1]


def _until_enough(question: Question, suffix: str, options: dict[str, Any]) -> Iterator[WayOut]:
    device, own = question.situation.device, question.situation.devices
    count = own * 2
    while count <= _MOST_DEVICES:
        asked = options | {"count": count} | ({"tp": count} if question.engine.splits_tensors else {})
        try:
            found = answer(question.on(device, count))
        except AnaphoraError:
            return
        more = count - own
        yield WayOut(f"{count} x {device.name}{suffix}", asked, found, f"{more} more device{'s' if more > 1 else ''}")
        if found.fits:
            return
        count *= 2


def _other_engine(question: Question) -> Iterator[WayOut]:
    """Off our own engine, which stores weights in 16 or 32 bits, to one that reads quantised files."""
    if question.engine.name != "anaphora":
        return
    engine = find_engine("llama.cpp")
    for scheme in ("q8_0", "q4_k_m"):
        settings = replace(question.settings, kv_cache_dtype="auto", block_size=None)
        situation = replace(question.situation, settings=settings, quantization=scheme)
        options = {"engine": engine.name, "quantization": scheme}
        try:
            found = answer(replace(question, engine=engine, situation=situation))
        except AnaphoraError:
            continue
        yield WayOut(f"llama.cpp with {scheme.upper()} weights", options, found, "another engine, some quality")


def _other_device(question: Question) -> Iterator[WayOut]:
    """The device of the same vendor with the least memory that is enough, the fastest of equals.

    As many as now; where none is large enough, twice, four times ... up to eight.
    """
    own, count = question.situation.device, question.situation.devices
    if own.kind != "gpu":
        return

    def order(device: Device) -> tuple[float, float]:
        return round((device.memory_bytes or 0) / GIB), -device.bandwidth

    larger = [device for device in gpus_of(own.vendor) if (device.memory_bytes or 0) > (own.memory_bytes or 0)]
    while count <= max(_MOST_DEVICES, question.situation.devices):
        for device in sorted(larger, key=order):
            try:
                found = answer(question.on(device, count))
            except AnaphoraError:
                continue
            if found.fits:
                yield _on_other(question, device, count, found)
                return
        count *= 2


def _on_other(question: Question, device: Device, count: int, found: Answer) -> WayOut:
    options: dict[str, Any] = {"hardware": device.id}
    named = f"{device.name} ({(device.memory_bytes or 0) / GIB:.1f} GiB)"
    if count == question.situation.devices:
        return WayOut(named, options, found, "other hardware")
    options |= {"count": count} | ({"tp": count} if question.engine.splits_tensors else {})
    return WayOut(f"{count} x {named}", options, found, "other hardware")
