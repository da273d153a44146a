"""Who takes part: where each engine's environment lies, how its worker and its server are started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

OURS = "anaphora"
VLLM_VERSION = "0.32.0"
LLAMA_VERSION = "0.3.36"
OPENVINO_VERSION = "2026.4.1.0"


@dataclass(frozen=True, slots=True)
class Places:
    """Where things lie. `cache` holds environments, sources, converted weights and logs of every run."""

    cache: Path
    model: Path
    threads: int
    fast_bfloat16: bool
    """Whether this CPU has bfloat16 instructions, as torch sees it."""

    def python(self, environment: str) -> Path:
        return self.bin(environment) / "python"

    def bin(self, environment: str) -> Path:
        return self.cache / environment / "bin"

    @property
    def llama_source(self) -> Path:
        return self.cache / "llama.cpp" / f"llama_cpp_python-{LLAMA_VERSION}"

    @property
    def llama_build(self) -> Path:
        return self.cache / "llama.cpp" / "build" / "bin"

    @property
    def large_model(self) -> Path:
        return self.cache / "models" / "qwen2.5-1.5b-random"

    def openvino_model(self, model: Path) -> Path:
        return self.cache / "openvino-models" / model.name

    def log(self, name: str) -> Path:
        folder = self.cache / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.log"

    def gguf(self, model: Path, kind: str) -> Path:
        return self.cache / "gguf" / f"{model.name}-{kind}.gguf"


Environ = Callable[[Places], dict[str, str]]
Command = Callable[[Places, int], list[str]]


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    environment: str = ""
    """Its environment's folder in the cache; empty = the one that runs this script."""
    module: str = ""
    environ: Environ = lambda _: {}
    serve: Command | None = None
    """Its server's command line, given the port."""
    skips: Mapping[str, str] = field(default_factory=dict)
    """Workloads it takes no part in, and why."""

    def python(self, places: Places) -> Path:
        return places.python(self.environment) if self.environment else Path(sys.executable)

    def command(self, places: Places, port: int) -> list[str]:
        """Its server's command line. Only where `serve` is given."""
        assert self.serve is not None
        return self.serve(places, port)


def _vllm_environ(places: Places) -> dict[str, str]:
    """As vLLM's documentation of the CPU build asks: pool in GiB, cores, Intel's OpenMP loaded first."""
    found = sorted((places.cache / "vllm" / "lib").glob("libiomp5.so"))
    return {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{places.threads - 1}",
        "OMP_NUM_THREADS": str(places.threads),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(places.cache / "vllm-cache"),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{places.bin('vllm')}:{os.environ.get('PATH', '')}",
    } | ({"LD_PRELOAD": str(found[0])} if found else {})


def _llama_environ(places: Places) -> dict[str, str]:
    return {
        "LLAMA_CPP_LIB_PATH": str(places.llama_build),
        "PYTHONPATH": f"{Path(__file__).resolve().parents[2]}:{places.llama_source}",
    }


def _serve_ours(places: Places, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "anaphora", "serve", str(places.model)),
        *("--port", str(port), "--kv-memory", "512MiB"),
    ]


def _serve_vllm(places: Places, port: int) -> list[str]:
    return [
        # Not `vllm serve`: it asks for the version of a package called vllm, and this one is vllm-cpu.
        *(str(places.python("vllm")), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(places.model), "--host", "127.0.0.1"),
        *("--port", str(port), "--max-model-len", "8192"),
        *("--dtype", "bfloat16" if places.fast_bfloat16 else "float32"),
    ]


def _serve_llama(places: Places, port: int) -> list[str]:
    kind = "bf16" if places.fast_bfloat16 else "f16"
    return [
        *(str(places.llama_build / "llama-server"), "-m", str(places.gguf(places.model, kind))),
        *("--host", "127.0.0.1", "--port", str(port), "-c", "8192", "-np", "1", "-t", str(places.threads)),
    ]


SAME_PASS = dict.fromkeys(
    ("prefill-2048", "prefill-4096", "large-decode-1"),
    "one stream is the plain forward pass: see transformers",
)

PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, module="ours", serve=_serve_ours),
        Peer("transformers", "transformers", "transformers_eager"),
        Peer("transformers-cb", "transformers", "transformers_batching", skips=SAME_PASS),
        Peer("vllm", "vllm", "vllm_cpu", _vllm_environ, _serve_vllm),
        Peer("llama.cpp", "llama-cpp-python", "llama_cpp", _llama_environ, _serve_llama),
        Peer("openvino", "openvino", "openvino_genai"),
    )
}
