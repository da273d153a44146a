"""Settings in the words of each engine: `emit(target, settings)`. One module a target."""

from __future__ import annotations

from anaphora.errors import ConfigError
from anaphora.planning.emit.anaphora import AnaphoraYaml
from anaphora.planning.emit.compose import Compose
from anaphora.planning.emit.llama_server import LlamaServer
from anaphora.planning.emit.ollama import OllamaModelfile
from anaphora.planning.emit.sglang import Sglang
from anaphora.planning.emit.target import Target
from anaphora.planning.emit.vllm import VllmCli, VllmYaml
from anaphora.planning.settings import PlanSettings

__all__ = ["TARGETS", "emit", "find_target"]

_ALL: tuple[Target, ...] = (
    VllmYaml(),
    VllmCli(),
    Compose(),
    Sglang(),
    LlamaServer(),
    OllamaModelfile(),
    AnaphoraYaml(),
)
TARGETS: dict[str, Target] = {target.name: target for target in _ALL}


def find_target(name: str) -> Target:
    """A target by name. Raises ConfigError."""
    if name not in TARGETS:
        raise ConfigError(f"--emit {name!r} is not known; choose one of {', '.join(TARGETS)}")
    return TARGETS[name]


def emit(name: str, settings: PlanSettings) -> str:
    """The text of one target. Raises ConfigError for an unknown one and for settings made for another engine."""
    target = find_target(name)
    if settings.engine != target.engine:
        raise ConfigError(
            f"--emit {name} writes settings for {target.engine}, but the plan is for {settings.engine}; "
            f"give --engine {target.engine} or another target"
        )
    return target.render(settings)
