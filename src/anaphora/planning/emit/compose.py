"""A docker compose file that runs vLLM's OpenAI server on port 8000."""

from __future__ import annotations

from anaphora.planning.emit.render import comment, flag, header, yaml_scalar
from anaphora.planning.emit.vllm import MADE_FOR, allowed, vllm_flags
from anaphora.planning.settings import PlanSettings

IMAGE = "vllm/vllm-openai:v0.33.0"


class Compose:
    """`docker compose up`."""

    name = "compose"
    engine = "vllm"

    def render(self, settings: PlanSettings) -> str:
        top = header(settings, MADE_FOR, "Use: save as compose.yaml, then `docker compose up`")
        words = [_comment("the model: a name of the Hub, or a folder inside the container"), _item(settings.model)]
        for line in vllm_flags(settings):
            parts = flag(line)
            words.append(_comment(line.why if parts else f"({line.key}) {line.why}"))
            words += [_item(part) for part in parts]
        return f"""{top}
services:
  vllm:
    # pinned: flags come and go between versions
    image: {IMAGE}
    command:
{"".join(words)}    ports:
      # the OpenAI API: http://localhost:8000/v1
      - "8000:8000"
    # shared memory between the server's processes
    ipc: host
    environment:
      # for models that ask for a login; may stay empty
      HF_TOKEN: ${{HF_TOKEN:-}}
{"".join(_variable(word) for word in allowed(settings))}    volumes:
      # weights are downloaded once
      - ${{HOME}}/.cache/huggingface:/root/.cache/huggingface
    restart: unless-stopped
    deploy:
      resources:
        reservations:
          devices:
            # {settings.devices} device{"s" if settings.devices > 1 else ""}, as planned
            - driver: nvidia
              count: {settings.devices}
              capabilities: [gpu]
"""


def _comment(text: str) -> str:
    return comment(f"{text}.", "      ")


def _variable(word: str) -> str:
    name, _, value = word.partition("=")
    return f"      # the context is beyond the model's own limit\n      {name}: '{value}'\n"


def _item(word: str) -> str:
    """A word of the command; numbers are quoted, because a command is a list of strings."""
    plain = yaml_scalar(word) if word[0] not in "-0123456789" else f'"{word}"'
    return f"      - {plain}\n"
