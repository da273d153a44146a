"""From an engine's start-up log to an EngineReport: which engine it is, then its own reader."""

from __future__ import annotations

import re
from collections.abc import Callable

from anaphora.errors import ConfigError
from anaphora.planning.engine_report import EngineReport
from anaphora.planning.start_log_anaphora import read_anaphora
from anaphora.planning.start_log_llama_cpp import read_llama_cpp, read_ollama
from anaphora.planning.start_log_sglang import read_sglang
from anaphora.planning.start_log_vllm import read_vllm

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MARKS: tuple[tuple[str, Callable[[str, str], EngineReport]], ...] = (
    (r"KV per token  [\d,]+ bytes", read_anaphora),
    (r"server_args=ServerArgs\(|Load weight (?:begin|end)\.|max_total_num_tokens=", read_sglang),
    (r"\b(?:vllm|vLLM|VLLM_\w+)\b|LLM engine \(v|GPU KV cache size:|# (?:GPU|cuda) blocks:", read_vllm),
    (r"source=(?:server|routes|sched|device|ggml)\.go|\bOLLAMA_\w+|ollama", read_ollama),
    (r"llama_kv_cache|llama_context:|llama_model_loader|llama_new_context_with_model|load_tensors:", read_llama_cpp),
)
"""A pattern that only this engine's log has -> its reader; the first that is found wins."""


def read_log(text: str, source: str = "the log") -> EngineReport:
    """What the log says of memory. Raises ConfigError for an empty log, an unknown engine, or one that says nothing."""
    text = _ANSI.sub("", text)
    if not text.strip():
        raise ConfigError(
            f"{source} is empty; start the engine with its output in a file: vllm serve ... 2>&1 | tee log"
        )
    for pattern, reader in _MARKS:
        if re.search(pattern, text):
            report = reader(text, source)
            if report.available_bytes is None and report.tokens is None and report.num_blocks is None:
                raise ConfigError(
                    f"{source} is a log of {report.engine}, but it ends before the KV cache is allotted (or the lines "
                    "are filtered out). Give the whole start-up log, at level INFO, up to the line that says the "
                    f"server is ready{_because(report)}"
                )
            return report
    raise ConfigError(
        f"{source} is no start-up log that can be read here: logs of vLLM, SGLang, llama.cpp, Ollama and anaphora can. "
        "For a running server give --attach URL instead"
    )


def _because(report: EngineReport) -> str:
    return f". It stopped with: {report.refused}" if report.refused else ""
