"""The engines a plan can be made for: each one's memory model, budget and defaults behind one name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from anaphora.errors import ConfigError
from anaphora.planning.anaphora_pool import AnaphoraMemory
from anaphora.planning.llama_cpp import LlamaCppMemory, OllamaMemory
from anaphora.planning.overhead import Budget, Situation
from anaphora.planning.overhead_engines import (
    anaphora_budget,
    default_mem_fraction,
    llama_cpp_budget,
    sglang_budget,
    transformers_budget,
)
from anaphora.planning.overhead_vllm import NEWEST, default_batched_tokens, default_utilization, vllm_budget
from anaphora.planning.protocol import Capacity, EngineSettings, MemoryModel
from anaphora.planning.sglang import SglangMemory
from anaphora.planning.transformers_cb import TransformersMemory
from anaphora.planning.vllm import VllmMemory

_PLAIN_KV = (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"))
_VLLM_KV = (*_PLAIN_KV, ("int8", "int8_per_token_head"), ("int4", "int4_per_token_head"))
_SMALLER = ("int8", "fp8_e4m3", "k8v4", "int4")
_ASYNC_SINCE = (0, 26)
"""From here on two batches may be in flight (asynchronous scheduling); 0.25.1 logs show one."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine."""

    name: str
    memory: MemoryModel
    budget: Callable[[Situation], Budget]
    share_name: str
    """What it calls its share of the memory."""
    half_kv: tuple[str, ...]
    """KV dtypes of half the size and below, best quality first."""
    shares_prefixes: bool
    """Whether requests share the blocks of a common prefix."""
    splits_tensors: bool
    """Whether several devices work as one through tensor parallelism; else layers are spread, or it has one only."""
    kv_names: tuple[tuple[str, str], ...] = ()
    """Its own names for common ones of KV dtypes."""

    def capacity(self, situation: Situation, available: int) -> Capacity:
        """Blocks and concurrency for `available` bytes. Raises ConfigError, UnsupportedModel."""
        return self.memory.capacity(situation.geometry, _of_version(self, situation), max(0, available))

    def share(self, situation: Situation) -> float | None:
        """The share in force; None where the engine's rule is no share of the whole."""
        if situation.utilization is not None:
            return situation.utilization
        if self.name == "vllm":
            return default_utilization(situation.version)
        return default_mem_fraction(situation) if self.name == "sglang" else None


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("vllm", VllmMemory(), vllm_budget, "gpu_memory_utilization", ("fp8",), True, True, _VLLM_KV),
        Engine("sglang", SglangMemory(), sglang_budget, "mem_fraction_static", ("fp8_e4m3",), True, True, _PLAIN_KV),
        Engine("llama.cpp", LlamaCppMemory(), llama_cpp_budget, "share", ("q8_0", "q4_0"), False, False),
        Engine("ollama", OllamaMemory(), llama_cpp_budget, "share", ("q8_0", "q4_0"), False, False),
        Engine(
            "transformers", TransformersMemory(), transformers_budget, "max_memory_percent", (), True, True, _PLAIN_KV
        ),
        Engine("anaphora", AnaphoraMemory(), anaphora_budget, "share", _SMALLER, True, False, _PLAIN_KV),
    )
}


def find_engine(name: str) -> Engine:
    """An engine by name. Raises ConfigError."""
    known = {"llamacpp": "llama.cpp", "llama-server": "llama.cpp", "llama-cpp": "llama.cpp", "hf": "transformers"}
    engine = ENGINES.get(known.get(name, name))
    if engine is None:
        raise ConfigError(f"engine {name!r} is not known; choose one of {', '.join(ENGINES)}")
    return engine


def _of_version(engine: Engine, situation: Situation) -> EngineSettings:
    settings, version = situation.settings, situation.version or NEWEST
    if engine.name != "vllm" or version >= _ASYNC_SINCE or settings.pipeline_parallel_size > 1:
        return settings
    batch = settings.max_num_batched_tokens or default_batched_tokens(settings, version)
    return replace(settings, max_num_batched_tokens=max(1, batch // 2))
