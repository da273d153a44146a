"""Real servers: one with SmolLM2 for all tests, and small ones with random weights on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from anaphora.engine.loop import EngineLoop
from anaphora.server.settings import ServerSettings, ServerState
from support.engines import make_engine
from support.models import tiny_llama
from support.servers import Served, running

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def smol(smollm2: Path) -> Iterator[Served]:
    """SmolLM2-135M-Instruct under two names."""
    loop = EngineLoop(make_engine(smollm2, max_model_len=1024, max_num_seqs=8, kv_memory=128 << 20))
    loop.start()
    with running(ServerState(ServerSettings(("smollm2-135m", "alias")), loop)) as served:
        yield served


ServeTiny = Callable[..., Served]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model that is nothing but quick: two layers of random weights, one token per byte."""
    return tiny_llama(tmp_path_factory.mktemp("tiny"), max_position=8192)


@pytest.fixture(scope="session")
def tiny_loop(tiny: Path) -> Callable[..., EngineLoop]:
    """Function: a started loop over a new engine."""

    def make(*, max_waiting: int = 1024, **settings: object) -> EngineLoop:
        chosen: dict[str, Any] = {"max_model_len": 128, "num_blocks": 128, "chat_template": CHAT_TEMPLATE, **settings}
        loop = EngineLoop(make_engine(tiny, **chosen), max_waiting=max_waiting)
        loop.start()
        return loop

    return make


@pytest.fixture
def serve_tiny(tiny_loop: Callable[..., EngineLoop]) -> Iterator[ServeTiny]:
    """Function: a server of its own; keywords of ServerSettings, the rest goes to the engine."""
    with ExitStack() as stack:

        def start(*, settings: ServerSettings | None = None, **engine: object) -> Served:
            state = ServerState(settings or ServerSettings(("tiny",)), tiny_loop(**engine))
            return stack.enter_context(running(state))

        yield start
