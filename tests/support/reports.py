"""Public start-up reports against what a plan predicts from the names of the hardware and the model alone.

Nothing of a report but its settings goes into a prediction; its figures are only compared with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anaphora.errors import AnaphoraError
from anaphora.geometry.model import ModelGeometry
from anaphora.planning.ask import Wishes, ask
from anaphora.planning.llama_cpp import DEFAULT_UBATCH, LlamaCppMemory
from anaphora.planning.plan import Question, answer
from anaphora.planning.protocol import EngineSettings

FILE = Path(__file__).parents[3] / "shared" / "data" / "sizing_logs" / "reports.jsonl"
GIB = 2**30
_PRINTED_BY_LENGTH = (0, 20)
"""vLLM from here on prints tokens as concurrency x max_model_len."""
SAME_SHAPE: dict[str, tuple[str, str | None]] = {
    "Qwen/Qwen2.5-14B-Instruct-AWQ": ("Qwen/Qwen2.5-14B-Instruct", "awq"),
    "ybelkada/llava-1.5-7b-hf-awq": ("llava-hf/llava-1.5-7b-hf", "awq"),
    "cpatonn/Qwen3-30B-A3B-Thinking-2507-AWQ-4bit": ("Qwen/Qwen3-30B-A3B", "int4"),
    "DeepSeek-R1-Distill-Qwen-32B-FP8": ("Qwen/Qwen2.5-32B-Instruct", "fp8"),
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": ("meta-llama/Llama-3.3-70B-Instruct", "fp8"),
    "cyankiwi/gemma-4-26B-A4B-it-qat-AWQ-INT4": ("google/gemma-4-26B-A4B-it", "int4"),
    "RedHatAI/gemma-4-26B-A4B-it-NVFP4": ("google/gemma-4-26B-A4B-it", "nvfp4"),
    "poolside/Laguna-S-2.1-INT4": ("poolside/Laguna-S-2.1-FP8", "int4"),
    "poolside/Laguna-S-2.1-NVFP4": ("poolside/Laguna-S-2.1-FP8", "nvfp4"),
    "unsloth/Qwen3.8-27B-NVFP4": ("Qwen/Qwen3.5-27B", "nvfp4"),
}
"""Checkpoints that are not in the catalogue, by the model they are made of and the scheme in their name."""
DEVICES = {
    "L4 24GB": "l4",
    "A100 40GB": "a100-40gb",
    "A100-SXM4-40GB": "a100-40gb",
    "A100 80GB": "a100-80gb",
    "V100 32GB": "v100-32gb",
    "H100 80GB": "h100",
    "H100 80GB HBM3": "h100",
    "H200 141GB": "h200",
    "L40S 48GB": "l40s",
    "RTX 3090 24GB": "rtx-3090",
    "RTX 4080 16GB": "rtx-4080",
    "RTX 4090 24GB": "rtx-4090",
    "RTX 5090 32GB": "rtx-5090",
    "RTX A5000 24GB": "rtx-a5000",
    "GB10 (DGX Spark) 128GB unified": "gb10",
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """One report and what the plan said."""

    row: int
    engine: str
    version: str
    model: str
    family: str
    device: str
    ranks: int
    tokens: int
    low: int
    high: int
    truth: int

    @property
    def error(self) -> float:
        return self.tokens / self.truth - 1

    @property
    def inside(self) -> bool:
        return self.low <= self.truth <= self.high


def reports() -> list[dict[str, Any]]:
    """The rows as they are."""
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def left_out(report: dict[str, Any]) -> str | None:
    """Why nothing can be predicted for a row from its settings; None when it can."""
    vllm = report["engine"] == "vllm"
    note = report["note"] or ""
    if not vllm and report["engine"] != "sglang":
        return "another engine"
    if report["model_inferred"]:
        return "model not stated"
    if report["gpu"] is None:
        return "device not stated"
    if report["gpu"] not in DEVICES:
        return "device not in the catalogue"
    share = report["gpu_memory_utilization"] if vllm else report["mem_fraction_static"]
    if share is None:
        return "share not stated"
    if vllm and report["engine_version"] is None:
        return "version not stated"
    if "speculative draft" in note:
        return "a draft model of unknown size shares the device"
    if "flags not shown" in note:
        return "flags not shown"
    return None


def question_of(report: dict[str, Any]) -> Question:
    """The settings of a report as a question. Raises AnaphoraError."""
    name = re.sub(r"\s*\(.*", "", report["model"])
    scheme = report["quantization"] if report["quantization"] == "fp8" else None
    name, scheme = SAME_SHAPE.get(report["model"], (name, scheme))
    geometry = ModelGeometry.from_catalog(name)
    vllm = report["engine"] == "vllm"
    context = report["max_model_len"] or geometry.max_position
    wishes = Wishes(
        hardware=DEVICES[report["gpu"]],
        tp=report["tensor_parallel"],
        pp=report["pipeline_parallel"],
        context=context,
        engine=report["engine"],
        engine_version=report["engine_version"] if vllm else None,
        quantization=scheme,
        utilization=report["gpu_memory_utilization"] if vllm else report["mem_fraction_static"],
        max_num_batched_tokens=report["max_num_batched_tokens"],
        allow_long=True,
    )
    question, _ = ask(name, geometry, wishes)
    eager = bool(report["enforce_eager"])
    batch = {"max_num_batched_tokens": None} if report["max_num_batched_tokens"] is None and vllm else {}
    return question.changed(max_num_seqs=report["max_num_seqs"], eager=eager, **batch)


def predict() -> Iterator[Prediction]:
    """Every row that can be predicted."""
    for row, report in enumerate(reports()):
        if left_out(report) is not None:
            continue
        try:
            question = question_of(report)
        except AnaphoraError:
            continue
        version = question.situation.version
        by_length = version is not None and version >= _PRINTED_BY_LENGTH

        def tokens(available: int, question: Question = question, by_length: bool = by_length) -> int:
            capacity = question.engine.capacity(question.situation, available)
            return capacity.tokens if by_length else capacity.tokens_older

        figures = report["reported"]
        truth = figures["kv_tokens"]
        if truth is None and figures["num_gpu_blocks"]:
            truth = figures["num_gpu_blocks"] * 16
        if truth is None and figures["available_kv_gib"] is not None:
            truth = tokens(int(figures["available_kv_gib"] * GIB))
        if truth is None:
            continue
        available = answer(question).budget.available
        yield Prediction(
            row,
            report["engine"],
            report["engine_version"] or "-",
            report["model"],
            question.geometry.model_type,
            question.situation.device.id,
            question.situation.ranks,
            tokens(available.likely),
            tokens(available.low),
            tokens(available.high),
            truth,
        )


@dataclass(frozen=True, slots=True)
class Need:
    """A figure that must come out exactly (to the two decimals it is printed with)."""

    row: int
    model: str
    what: str
    computed: float
    printed: float

    @property
    def exact(self) -> bool:
        return abs(self.computed - self.printed) < 0.0051 * max(1.0, self.printed / 100)


LLAMA_CPP = {
    "Gemma-4-E4B-It Q8_0": "google/gemma-4-E4B-it",
    "qwen2.5-coder:32b Q4_K_M": "Qwen/Qwen2.5-Coder-32B-Instruct",
    "Qwen3-4B-abliterated Q6_K": "Qwen/Qwen3-4B",
    "Mistral-Nemo-Instruct-2407 Q5_K_M": "mistralai/Mistral-Nemo-Instruct-2407",
    "gpt-oss-20b GGUF (mxfp4)": "openai/gpt-oss-20b",
    "Qwen2.5-14B-Instruct Q4_K_M": "Qwen/Qwen2.5-14B-Instruct",
}


def needs() -> Iterator[Need]:
    """KV figures that depend on the model and the settings alone."""
    for row, report in enumerate(reports()):
        figures, name = report["reported"], report["model"]
        if name in LLAMA_CPP:
            yield from _llama_cpp(row, report, ModelGeometry.from_catalog(LLAMA_CPP[name]))
        elif figures["needed_kv_gib"] is not None and not report["model_inferred"]:
            try:
                geometry = ModelGeometry.from_catalog(name)
            except AnaphoraError:
                continue
            wishes = Wishes("h100", tp=report["tensor_parallel"], context=report["max_model_len"], engine="vllm")
            question, _ = ask(name, geometry, wishes)
            needed = question.engine.capacity(question.situation, 1 << 50).request_bytes / GIB
            yield Need(row, name, "one request", needed, figures["needed_kv_gib"])


def _llama_cpp(row: int, report: dict[str, Any], geometry: ModelGeometry) -> Iterator[Need]:
    """Cells of `-c`, split over slots only by the window's caches (four slots on one unified cache)."""
    figures = report["reported"]
    memory = LlamaCppMemory()
    full, _, _ = memory.slot_bytes(geometry, EngineSettings(report["max_model_len"], kv_cache_dtype="f16"))
    yield Need(row, report["model"], "keys and values", full / GIB, figures["k_gb"] + figures["v_gb"])
    slots = report["max_num_seqs"] or 1
    if figures["state_gib"] is not None:
        sliding = memory.unified_sliding_bytes(geometry, EngineSettings(report["max_model_len"]), slots)
        yield Need(row, report["model"], "sliding layers", sliding / GIB, figures["state_gib"])
    if report["gpu"] and "RTX 3090" in report["gpu"] and slots == 4:
        compute = DEFAULT_UBATCH * (geometry.vocab_size + geometry.hidden_size) * 4 / GIB
        yield Need(row, report["model"], "compute buffer", compute, figures["compute_buffer_gib"])
